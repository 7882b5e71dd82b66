// What the test programs of the core share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#define EXPECT(condition)                                                        \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                             \
    }                                                                            \
  } while (false)

// What the error says that `action` throws; empty if it throws none.
template <typename Error, typename Action>
std::string text_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
