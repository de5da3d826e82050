/* own_threads.cpp: a host that has a thread pool already lends it to the library (config.parallel_for): no second set of
 * threads fights for the same cores. Continues a prompt, greedily; how many tasks each thread ran goes to stderr.
 *
 *     c++ -std=c++17 own_threads.cpp $(pkg-config --cflags --libs colibri) -lpthread -o own_threads
 *     ./own_threads model.colibri "Once upon a time" [tokens]
 */
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <thread>
#include <vector>

#include <colibri.hpp>

/* Stands for the host's own. The caller works too; tasks are handed out one by one under a lock. */
class ThreadPool {
public:
    explicit ThreadPool(unsigned workers) : counts_(workers + 1) {
        for (unsigned i = 1; i <= workers; i++) threads_.emplace_back([this, i] { work(i); });
    }
    ~ThreadPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        begun_.notify_all();
        for (std::thread &thread : threads_) thread.join();
    }

    /* What the library calls: every task once, and back when all are done. Tasks never wait for one another, so it does not
     * matter how many threads there are, or in which order they come. */
    static void parallel_for(colibri_task_fn task, void *argument, std::int32_t n, void *user_data) {
        static_cast<ThreadPool *>(user_data)->run(task, argument, n);
    }
    std::int32_t size() const { return static_cast<std::int32_t>(counts_.size()); }
    const std::vector<unsigned long> &counts() const { return counts_; } /* while nothing runs */

private:
    void run(colibri_task_fn task, void *argument, std::int32_t n) {
        std::lock_guard<std::mutex> one_caller(callers_);
        std::unique_lock<std::mutex> lock(mutex_);
        task_ = task;
        argument_ = argument;
        next_ = 0;
        end_ = unfinished_ = n;
        begun_.notify_all();
        take_all(lock, 0);
        ended_.wait(lock, [this] { return unfinished_ == 0; });
    }
    void take_all(std::unique_lock<std::mutex> &lock, std::size_t thread) {
        while (next_ < end_) {
            std::int32_t i = next_++;
            counts_[thread]++;
            lock.unlock();
            task_(argument_, i);
            lock.lock();
            if (--unfinished_ == 0) ended_.notify_one();
        }
    }
    void work(std::size_t thread) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!stopping_) {
            take_all(lock, thread);
            begun_.wait(lock, [this] { return stopping_ || next_ < end_; });
        }
    }

    std::vector<unsigned long> counts_; /* tasks by thread; 0: the caller */
    std::mutex callers_, mutex_;
    std::condition_variable begun_, ended_;
    colibri_task_fn task_ = nullptr;
    void *argument_ = nullptr;
    std::int32_t next_ = 0, end_ = 0, unfinished_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> threads_; /* last: they use what is above */
};

static void tell(ThreadPool &pool, const char *path, const char *prompt, std::size_t most) {
    colibri::Config config;
    config.model_path = path;
    config.num_threads = pool.size();
    config.parallel_for = ThreadPool::parallel_for;
    config.parallel_for_user_data = &pool;
    colibri::Session session(config);
    std::cout << prompt << session.generate(prompt, most) << '\n';
    std::cerr << "tasks by thread:";
    for (unsigned long n : pool.counts()) std::cerr << ' ' << n;
    std::cerr << '\n';
}

int main(int argc, char **argv) {
    if (argc < 3) {
        std::cerr << "usage: own_threads MODEL PROMPT [TOKENS]\n";
        return 2;
    }
    try {
        ThreadPool pool(std::thread::hardware_concurrency() > 1 ? std::thread::hardware_concurrency() - 1 : 1);
        tell(pool, argv[1], argv[2], argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 60);
        return EXIT_SUCCESS;
    } catch (const colibri::Error &error) {
        std::cerr << "own_threads: " << error.what() << " (" << error.name() << ")\n";
        return EXIT_FAILURE;
    }
}
