/* hosts.cpp: all of colibri.hpp, against itself and against what the command line says the demo model's greedy text is. Built and
 * run by tests/python/test_hosts.py:  hosts MODEL PROMPT EXPECTED TOKENS PROFILE */
#include <colibri.hpp>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <type_traits>

static int checks, failures;
#define CHECK(condition) \
    (checks++, (condition) ? (void)0 : (void)(failures++, std::fprintf(stderr, "%d: failed: %s\n", __LINE__, #condition)))

template <typename Work> static colibri_status_t thrown(Work work) {
    try {
        work();
    } catch (const colibri::Error &error) {
        CHECK(std::string(error.what()).size() > 10);
        return error.status();
    }
    return COLIBRI_OK;
}

static_assert(!std::is_copy_constructible<colibri::Session>::value && std::is_nothrow_move_constructible<colibri::Session>::value,
              "a session is moved, not copied");
static_assert(!std::is_copy_constructible<colibri::Model>::value && std::is_nothrow_move_assignable<colibri::Model>::value, "");

static void test_model(const colibri::Model &model, const char *path) {
    colibri::ModelInfo info = model.info();
    CHECK(info.vocab_size > 0 && info.num_experts > 0 && info.has_tokenizer);
    CHECK(info.num_eos == 0 || info.is_eos(info.eos_token[0]));
    CHECK(!info.is_eos(-7));
    model.verify();
    CHECK(model.chat_template().empty() == !info.has_chat_template);
    CHECK(model.metadata().empty() || model.metadata().front() == '{');
    std::string text = "Grüße! \xF0\x9F\x90\xA6 again and again";
    colibri::Tokens tokens = model.tokenize(text, 0);
    CHECK(model.detokenize(tokens) == text);
    CHECK(model.detokenize(model.tokenize("", 0)).empty());
    colibri::TextStream stream = model.stream();
    for (int round = 0; round < 2; round++) {
        std::string all;
        for (std::int32_t token : tokens) all += stream.add(token);
        CHECK(all + stream.end() == text);
    }
    CHECK(thrown([&] { (void)model.detokenize({info.vocab_size}); }) == COLIBRI_ERR_TOKEN);
    CHECK(thrown([] { colibri::Model("/no/such/file"); }) == COLIBRI_ERR_NOT_FOUND);

    std::ifstream file(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    colibri::Workspace memory(bytes.begin(), bytes.end());
    colibri::Model same(memory.data(), memory.size());
    CHECK(same.tokenize(text, 0) == tokens);
}

static colibri::Floats rows(colibri::Session &session, const colibri::Tokens &tokens, const std::vector<std::int32_t> &lengths) {
    session.infer(tokens, lengths);
    return session.output();
}

/* Slots apart, memory of the caller's, and objects that move: the same bits. */
static void test_slots(const colibri::Model &model) {
    colibri::Config config;
    config.max_batch_size = 2;
    config.max_seq_len = 64;
    colibri::Workspace workspace;
    {
        colibri::Config counting = config;
        counting.model = model.handle();
        workspace.resize(colibri::Session::workspace_size(counting));
    }
    config.workspace = workspace.data();
    config.workspace_size = workspace.size();
    colibri::Session first(model, config);
    colibri::Floats both = rows(first, {1, 2, 3, 7, 8}, {3, 2});
    std::size_t vocab = static_cast<std::size_t>(model.info().vocab_size);
    CHECK(both.size() == 2 * vocab);
    colibri::Session session = std::move(first);
    CHECK(session.slot_length(0) == 3 && session.slot_length(1) == 2 && session.slot_length(9) == -1);
    CHECK(session.slot_status(0) == COLIBRI_OK);
    colibri::Session alone(model);
    alone.infer({7, 8});
    colibri::Floats row = alone.output();
    CHECK(row == colibri::Floats(both.begin() + static_cast<std::ptrdiff_t>(vocab), both.end()));
    CHECK(alone.sample() == session.sample(1));
    session.truncate(0, 1);
    CHECK(session.slot_length() == 1);
    session.reset();
    CHECK(rows(session, {1, 2, 3, 7, 8}, {3, 2}) == both);
    session.cancel();
    CHECK(thrown([&] { session.infer({1}); }) == COLIBRI_ERR_CANCELLED);
    CHECK(thrown([&] { session.infer({1, -4}); }) == COLIBRI_ERR_TOKEN);
    bool refused = false;
    try {
        session.infer({1, 2}, {1});
    } catch (const std::invalid_argument &) {
        refused = true;
    }
    CHECK(refused);
    config.workspace_size = 64;
    CHECK(thrown([&] { colibri::Session(model, config); }) == COLIBRI_ERR_WORKSPACE);
    colibri::Config nothing;
    CHECK(thrown([&] { colibri::Session session_of_nothing(nothing); }) == COLIBRI_ERR_INVALID_ARGUMENT);
}

static void test_text(const colibri::Model &model, const std::string &prompt, const std::string &expected, std::size_t most) {
    colibri::Session session(model);
    std::string pieces;
    std::string all = session.generate(prompt, most, colibri::Sampling(), [&](std::string_view piece) {
        pieces += piece;
        return true;
    });
    CHECK(all == expected && pieces == expected);
    session.reset();
    CHECK(session.generate(prompt, most) == expected);
    session.reset();
    std::string begun = session.generate(prompt, most, colibri::Sampling(), [](std::string_view) { return false; });
    CHECK(!begun.empty() && begun.size() < expected.size() && expected.compare(0, begun.size(), begun) == 0);
    colibri::Sampling hot;
    hot.temperature = 5;
    hot.seed = 3;
    session.reset();
    CHECK(session.generate(prompt, most, hot) != expected);
}

static void test_layers_and_stats(const colibri::Model &model, const char *profile) {
    colibri::Config config;
    config.top_k = 1;
    colibri::Session session(model, config);
    std::size_t width = static_cast<std::size_t>(model.info().hidden_size);
    colibri::Floats hidden(3 * width, 0.25f);
    for (std::size_t i = 0; i < hidden.size(); i++) hidden[i] = static_cast<float>(i % 7) - 3;
    colibri::Session::Routes routes = session.route_tokens(0, hidden);
    CHECK(routes.experts.size() == 3 && routes.weights.size() == 3);
    colibri::Floats output = session.moe_forward(0, hidden);
    CHECK(output.size() == hidden.size() && output != hidden);
    session.infer({1, 2, 3});
    colibri::Stats stats = session.stats();
    CHECK(stats.prompt_tokens == 3 && stats.infer_calls == 1);
    std::uint64_t tokens = 0;
    for (const colibri_expert_stats_t &expert : session.expert_stats(0)) tokens += expert.tokens;
    CHECK(tokens >= 3);
    CHECK(session.metrics().find("colibri_") != std::string::npos);
    session.save_profile(profile);
    CHECK(std::ifstream(profile).good());
    session.stats_reset();
    CHECK(session.stats().infer_calls == 0);
    CHECK(thrown([&] { (void)session.expert_stats(999); }) == COLIBRI_ERR_INVALID_ARGUMENT);
}

int main(int argc, char **argv) {
    if (argc < 6) return 2;
    try {
        colibri::Model model(argv[1]);
        test_model(model, argv[1]);
        test_slots(model);
        test_text(model, argv[2], argv[3], std::strtoul(argv[4], nullptr, 10));
        test_layers_and_stats(model, argv[5]);
        colibri::Session left = [&] { return colibri::Session(colibri::Model(argv[1])); }(); /* outlives its Model */
        left.infer({1});
        CHECK(!left.output().empty());
    } catch (const std::exception &error) {
        std::fprintf(stderr, "not expected: %s\n", error.what());
        failures++;
    }
    std::fprintf(stderr, "%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
