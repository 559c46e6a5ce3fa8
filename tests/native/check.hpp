// A checker of twenty lines: CHECK ends the program with the place that failed,
// TEST registers a function, main() runs all or those named on the command line.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct TestCase {
  const char* name;
  void (*run)();
};
inline std::vector<TestCase>& tests() {
  static std::vector<TestCase> all;
  return all;
}
struct Registered {
  Registered(const char* name, void (*run)()) { tests().push_back({name, run}); }
};
#define TEST(name)                                        \
  static void name();                                     \
  static const Registered registered_##name(#name, name); \
  static void name()
#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (0)

inline int run_tests(int argc, char** argv) {
  int ran = 0;
  for (const TestCase& test : tests()) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++ran;
  }
  std::printf("%d tests passed\n", ran);
  return ran > 0 ? 0 : 1;
}
