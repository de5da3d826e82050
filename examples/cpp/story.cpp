/* story.cpp: continues a prompt, greedily, with colibri.hpp; the text appears as it is made, what it cost goes to stderr.
 *
 *     c++ -std=c++17 story.cpp $(pkg-config --cflags --libs colibri) -o story
 *     ./story model.colibri "Once upon a time" [tokens]
 */
#include <cstdlib>
#include <iostream>

#include <colibri.hpp>

static int tell(const char *path, const char *prompt, std::size_t most) {
    colibri::Model model(path);
    colibri::Session session(model);
    std::cout << prompt;
    session.generate(prompt, most, colibri::Sampling(), [](std::string_view piece) {
        std::cout << piece << std::flush;
        return true;
    });
    std::cout << '\n';
    colibri::Stats stats = session.stats();
    std::cerr << stats.prompt_tokens << " tokens read, " << stats.decode_tokens << " decoded in "
              << static_cast<double>(stats.infer_ns) / 1e6 << " ms\n";
    return EXIT_SUCCESS;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        std::cerr << "usage: story MODEL PROMPT [TOKENS]\n";
        return 2;
    }
    try {
        return tell(argv[1], argv[2], argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 60);
    } catch (const colibri::Error &error) {
        std::cerr << "story: " << error.what() << " (" << error.name() << ")\n";
        return EXIT_FAILURE;
    }
}
