// Renders a chat template with the engine of llama.cpp. Standard input has it and the variables of each case, as JSON.
#include <cstdlib>
#include <iostream>
#include <iterator>

#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "json.h"

extern "C" void ggml_abort(const char *, int, const char *, ...) { std::abort(); }

int main() {
    const std::string input(std::istreambuf_iterator<char>(std::cin), {});
    const common_json given = common_json::parse(input);
    const std::string source = given[0];
    jinja::lexer lexer;
    auto tokens = lexer.tokenize(source);
    jinja::program program = jinja::parse_from_tokens(tokens);
    common_json texts = common_json::array();
    for (const auto & variables : given[1]) {
        jinja::context context(source);
        jinja::global_from_json(context, variables, false);
        jinja::runtime runtime(context);
        texts.push_back(jinja::runtime::gather_string_parts(runtime.execute(program))->as_string().str());
    }
    std::cout << texts.dump() << std::endl;
}
