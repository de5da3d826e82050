/* colibri.hpp: libcolibri for C++17, one header over colibri.h: objects that clean up after themselves, exceptions instead of
 * statuses, strings and vectors instead of pointers and sizes. Needs nothing but the standard library; link libcolibri.
 *
 *     colibri::Model model("model.colibri");
 *     colibri::Session session(model);
 *     session.generate("Once upon a time", 100, colibri::Sampling(), [](std::string_view piece) {
 *         std::cout << piece << std::flush;
 *         return true;                                         // false: enough
 *     });
 *
 * or step by step, several sequences at once:
 *
 *     colibri::Config config;
 *     config.max_batch_size = 2;
 *     colibri::Session session(model, config);
 *     session.infer({1, 2, 3, 7, 8}, {3, 2});                  // 3 tokens for slot 0, 2 for slot 1, packed
 *     colibri::Floats logits = session.output();               // [2][vocab]
 *     int32_t next = session.sample(0);
 *
 * What a function does in detail, and when it fails, stands in colibri.h at the C function of the same name. Failures throw
 * colibri::Error, with the library's status and sentence. A moved-from object may only be destroyed or assigned to. Threads: a Model
 * may be used by any number at once, a Session by one at a time (cancel excepted). */
#ifndef COLIBRI_HPP
#define COLIBRI_HPP

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "colibri.h"

namespace colibri {

/* ---- Errors -------------------------------------------------------------------------------------------------------- */

/* A failed call: what() is the library's sentence. */
class Error : public std::runtime_error {
public:
    /* Of this thread's latest failed call. */
    explicit Error(colibri_status_t status) : std::runtime_error(sentence(status)), status_(status) {}
    colibri_status_t status() const noexcept { return status_; }
    const char *name() const noexcept { return colibri_status_name(status_); } /* "COLIBRI_ERR_FORMAT" */

private:
    static const char *sentence(colibri_status_t status) {
        const char *text = colibri_last_error();
        return text && *text ? text : colibri_status_name(status);
    }
    colibri_status_t status_;
};

inline void check(colibri_status_t status) {
    if (status != COLIBRI_OK) throw Error(status);
}

/* ---- Values -------------------------------------------------------------------------------------------------------- */

/* Memory on 64-byte boundaries, which the library asks for where it takes floats. */
template <typename T> struct AlignedAllocator {
    using value_type = T;
    static constexpr std::size_t alignment = 64;
    AlignedAllocator() noexcept = default;
    template <typename U> AlignedAllocator(const AlignedAllocator<U> &) noexcept {}
    T *allocate(std::size_t n) {
        if (n > std::numeric_limits<std::size_t>::max() / sizeof(T)) throw std::bad_array_new_length();
        return static_cast<T *>(::operator new(n * sizeof(T), std::align_val_t(alignment)));
    }
    void deallocate(T *p, std::size_t) noexcept { ::operator delete(p, std::align_val_t(alignment)); }
    template <typename U> bool operator==(const AlignedAllocator<U> &) const noexcept { return true; }
    template <typename U> bool operator!=(const AlignedAllocator<U> &) const noexcept { return false; }
};

using Floats = std::vector<float, AlignedAllocator<float>>;                         /* logits, hidden states */
using Workspace = std::vector<unsigned char, AlignedAllocator<unsigned char>>;      /* for Config::workspace */
using Tokens = std::vector<std::int32_t>;

/* The C structs with their defaults; all fields are those of colibri.h. Strings in a Config must live until the session is made. */
struct Config : colibri_config_t {
    Config() : colibri_config_t(COLIBRI_CONFIG_INIT) {}
};
struct Sampling : colibri_sampling_t { /* greedy */
    Sampling() : colibri_sampling_t(COLIBRI_SAMPLING_INIT) {}
};
struct ModelInfo : colibri_model_info_t {
    ModelInfo() : colibri_model_info_t(COLIBRI_MODEL_INFO_INIT) {}
    bool is_eos(std::int32_t token) const noexcept {
        for (std::int32_t i = 0; i < num_eos; i++)
            if (eos_token[i] == token) return true;
        return false;
    }
};
struct Stats : colibri_stats_t {
    Stats() : colibri_stats_t(COLIBRI_STATS_INIT) {}
};

/* ---- Text: of a model by pointer, so that sessions can use it too ------------------------------------------------------- */

namespace detail {

inline Tokens tokenize(const colibri_model_t *model, std::string_view text, std::uint32_t flags) {
    Tokens tokens(text.size() + 8);
    std::size_t count = 0;
    colibri_status_t status = colibri_tokenize(model, text.data(), text.size(), flags, tokens.data(), tokens.size(), &count);
    if (status == COLIBRI_ERR_BUFFER_TOO_SMALL) {
        tokens.resize(count);
        status = colibri_tokenize(model, text.data(), text.size(), flags, tokens.data(), tokens.size(), &count);
    }
    check(status);
    tokens.resize(count);
    return tokens;
}

inline std::string detokenize(const colibri_model_t *model, const Tokens &tokens, std::uint32_t flags) {
    std::string text(8 * tokens.size() + 8, '\0');
    std::size_t bytes = 0;
    colibri_status_t status =
        colibri_detokenize(model, tokens.data(), tokens.size(), flags, &text[0], text.size(), &bytes);
    if (status == COLIBRI_ERR_BUFFER_TOO_SMALL) {
        text.resize(bytes);
        status = colibri_detokenize(model, tokens.data(), tokens.size(), flags, &text[0], text.size(), &bytes);
    }
    check(status);
    text.resize(bytes);
    return text;
}

inline std::int32_t length_of(std::size_t n) {
    if (n > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) throw std::length_error("too many tokens");
    return static_cast<std::int32_t>(n);
}

struct CloseModel {
    void operator()(colibri_model_t *model) const noexcept { colibri_model_close(model); }
};
struct FreeSession {
    void operator()(colibri_t *session) const noexcept { colibri_free(session); }
};

} // namespace detail

/* Tokens in, whole characters out. Lives no longer than its model (or session). */
class TextStream {
public:
    explicit TextStream(const colibri_model_t *model, bool special = false) : model_(model), state_(COLIBRI_STREAM_INIT) {
        state_.flags = special ? COLIBRI_DETOKENIZE_SPECIAL : 0u;
    }
    std::string add(std::int32_t token) { return step(token); }
    std::string end() { /* what waited; the next token begins a new text */
        std::string rest = step(-1);
        std::uint32_t flags = state_.flags;
        state_ = COLIBRI_STREAM_INIT;
        state_.flags = flags;
        return rest;
    }

private:
    std::string step(std::int32_t token) {
        std::string text(64, '\0');
        std::size_t bytes = 0;
        colibri_status_t status = colibri_stream_token(model_, &state_, token, &text[0], text.size(), &bytes);
        if (status == COLIBRI_ERR_BUFFER_TOO_SMALL) {
            text.resize(bytes);
            status = colibri_stream_token(model_, &state_, token, &text[0], text.size(), &bytes);
        }
        check(status);
        text.resize(bytes);
        return text;
    }
    const colibri_model_t *model_;
    colibri_stream_t state_;
};

/* ---- Models -------------------------------------------------------------------------------------------------------- */

/* An open file. Sessions hold a reference of their own: a Model may go before them. */
class Model {
public:
    explicit Model(const std::string &path) {
        colibri_model_t *model = nullptr;
        check(colibri_model_open(path.c_str(), &model));
        model_.reset(model);
    }
    /* The bytes of a file in the caller's memory, 64-byte aligned; they stay as long as the model and its sessions. */
    Model(const void *data, std::size_t size) {
        colibri_model_t *model = nullptr;
        check(colibri_model_open_memory(data, size, &model));
        model_.reset(model);
    }
    colibri_model_t *handle() const noexcept { return model_.get(); } /* for functions of colibri.h; no reference is given */

    ModelInfo info() const {
        ModelInfo info;
        check(colibri_model_info(handle(), &info));
        return info;
    }
    void verify() const { check(colibri_model_verify(handle())); } /* reads everything */
    /* Empty if the file has none; valid as long as the model. */
    std::string_view chat_template() const { return text(colibri_model_chat_template); }
    std::string_view metadata() const { return text(colibri_model_metadata); }

    Tokens tokenize(std::string_view text, std::uint32_t flags = COLIBRI_TOKENIZE_ADD_SPECIAL) const {
        return detail::tokenize(handle(), text, flags);
    }
    std::string detokenize(const Tokens &tokens, std::uint32_t flags = 0) const {
        return detail::detokenize(handle(), tokens, flags);
    }
    TextStream stream(bool special = false) const { return TextStream(handle(), special); }

private:
    template <typename Function> std::string_view text(Function function) const {
        const char *data = nullptr;
        std::size_t bytes = 0;
        check(function(handle(), &data, &bytes));
        return std::string_view(data ? data : "", bytes);
    }
    std::unique_ptr<colibri_model_t, detail::CloseModel> model_;
};

/* ---- Sessions ------------------------------------------------------------------------------------------------------ */

/* One caller's state: slots with their KV caches. Can be moved, not copied. */
class Session {
public:
    /* On an open model; config.model_path must be NULL. */
    explicit Session(const Model &model, Config config = Config()) {
        config.model = model.handle();
        create(config);
    }
    /* As the config says (model_path). */
    explicit Session(const Config &config) { create(config); }
    colibri_t *handle() const noexcept { return session_.get(); }
    const colibri_model_t *model() const noexcept { return colibri_model(handle()); }

    /* Bytes for Config::workspace (on 64-byte boundaries, such as a Workspace's). */
    static std::size_t workspace_size(const Config &config) {
        std::size_t bytes = 0;
        check(colibri_workspace_size(&config, &bytes));
        return bytes;
    }

    /* Append lengths[i] tokens to slot i and run them; `tokens` packed in slot order. Error::status() COLIBRI_ERR_NOT_FINITE:
     * only the slots that slot_status names have failed. */
    void infer(const Tokens &tokens, const std::vector<std::int32_t> &lengths) {
        std::size_t sum = 0;
        for (std::int32_t n : lengths) sum += n > 0 ? static_cast<std::size_t>(n) : 0;
        if (sum != tokens.size()) throw std::invalid_argument("colibri: the lengths' sum is not the number of tokens");
        check(colibri_set_input(handle(), tokens.data(), lengths.data(), detail::length_of(lengths.size())));
        check(colibri_infer(handle()));
    }
    void infer(const Tokens &tokens) { infer(tokens, {detail::length_of(tokens.size())}); } /* slot 0 */

    /* Results of the latest infer, rows as config.outputs says. */
    Floats output() const {
        Floats values;
        output(values);
        return values;
    }
    void output(Floats &values) const { /* reuses the memory */
        std::size_t bytes = 0;
        check(colibri_output_size(handle(), &bytes));
        values.resize(bytes / sizeof(float));
        check(colibri_get_output(handle(), values.data(), bytes));
    }
    std::int32_t sample(std::int32_t slot = 0, const Sampling &sampling = Sampling()) {
        std::int32_t token = -1;
        check(colibri_sample(handle(), slot, &sampling, &token));
        return token;
    }

    colibri_status_t slot_status(std::int32_t slot) const noexcept { return colibri_slot_status(handle(), slot); }
    std::int32_t slot_length(std::int32_t slot = 0) const noexcept { return colibri_slot_length(handle(), slot); } /* -1: no slot */
    void truncate(std::int32_t slot, std::int32_t length) { check(colibri_truncate(handle(), slot, length)); }
    void reset() { check(colibri_reset(handle())); }
    void cancel() noexcept { colibri_cancel(handle()); } /* from any thread */

    /* Append the prompt to slot 0 (special tokens added if it is empty) and continue until an end token, `most` tokens, or
     * on_text(std::string_view) returns false. The session's other slots stay idle. Returns the whole continuation; slot 0 holds
     * what was computed, which is all but the last token. */
    template <typename OnText>
    std::string generate(std::string_view prompt, std::size_t most, const Sampling &sampling, OnText on_text) {
        const ModelInfo about = info();
        Tokens next = detail::tokenize(model(), prompt, slot_length() == 0 ? COLIBRI_TOKENIZE_ADD_SPECIAL : 0u);
        TextStream stream(model());
        std::string all;
        auto give = [&](const std::string &piece) {
            all += piece;
            return piece.empty() || on_text(std::string_view(piece));
        };
        for (std::size_t i = 0; i < most; i++) {
            infer(next);
            std::int32_t token = sample(0, sampling);
            if (about.is_eos(token)) break;
            if (!give(stream.add(token))) return all;
            next.assign(1, token);
        }
        give(stream.end());
        return all;
    }
    std::string generate(std::string_view prompt, std::size_t most, const Sampling &sampling = Sampling()) {
        return generate(prompt, most, sampling, [](std::string_view) { return true; });
    }

    /* For hosts that own the rest of a model: hidden is [n][hidden_size]. */
    struct Routes {
        std::vector<std::int32_t> experts; /* [n][top_k] */
        std::vector<float> weights;
    };
    Routes route_tokens(std::int32_t layer, const Floats &hidden) {
        std::int32_t n = rows_of(hidden);
        Routes routes;
        routes.experts.resize(static_cast<std::size_t>(n) * static_cast<std::size_t>(top_k_));
        routes.weights.resize(routes.experts.size());
        check(colibri_route_tokens(handle(), layer, hidden.data(), n, routes.experts.data(), routes.weights.data()));
        return routes;
    }
    Floats moe_forward(std::int32_t layer, const Floats &hidden) {
        Floats output(hidden.size());
        check(colibri_moe_forward(handle(), layer, hidden.data(), rows_of(hidden), output.data()));
        return output;
    }

    Stats stats() const {
        Stats stats;
        check(colibri_stats(handle(), &stats));
        return stats;
    }
    std::vector<colibri_expert_stats_t> expert_stats(std::int32_t layer) const {
        std::vector<colibri_expert_stats_t> rows(static_cast<std::size_t>(stats().num_experts));
        check(colibri_expert_stats(handle(), layer, rows.data(), rows.size()));
        return rows;
    }
    void stats_reset() noexcept { colibri_stats_reset(handle()); }
    std::string metrics() const { /* Prometheus text */
        std::string text;
        std::size_t bytes = 0;
        colibri_status_t status;
        while ((status = colibri_metrics(handle(), &text[0], text.size(), &bytes)) == COLIBRI_ERR_BUFFER_TOO_SMALL)
            text.resize(bytes);
        check(status);
        text.resize(bytes);
        return text;
    }
    void save_profile(const std::string &path) const { check(colibri_save_profile(handle(), path.c_str())); }

private:
    void create(const Config &config) {
        session_.reset(colibri_init(&config));
        if (!session_) throw Error(colibri_last_status());
        top_k_ = config.top_k ? config.top_k : info().top_k;
    }
    ModelInfo info() const {
        ModelInfo info;
        check(colibri_model_info(model(), &info));
        return info;
    }
    std::int32_t rows_of(const Floats &hidden) const {
        std::size_t width = static_cast<std::size_t>(info().hidden_size);
        if (hidden.size() % width != 0) throw std::invalid_argument("colibri: hidden is not [n][hidden_size]");
        return detail::length_of(hidden.size() / width);
    }
    std::unique_ptr<colibri_t, detail::FreeSession> session_;
    std::int32_t top_k_ = 0;
};

} // namespace colibri

#endif
