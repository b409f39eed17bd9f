// Arguments that are no arrays, taken by name: what does not fit is refused as the library refuses.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <type_traits>

namespace hexpert::python {

namespace nb = nanobind;

// Text that may hold what UTF-8 does not.
std::string text_of(nb::handle object);
// Of a type: "list", "numpy.ndarray".
std::string type_text(nb::handle type);
// The value of what was given when it is short, else its type: "None", "'2'", "2.5", "numpy.ndarray".
std::string given_text(nb::handle given);

// "name: expected wanted, got ...", as TypeError or ValueError.
[[noreturn]] void wrong_type(const char* name, const std::string& wanted, nb::handle given);
[[noreturn]] void wrong_value(const char* name, const std::string& wanted, nb::handle given);

// Anything with __index__, numpy's integers too, as an int.
nb::object index_argument(nb::handle given, const char* name, const char* wanted);
int64_t integer_argument(nb::handle given, const char* name, int bits);
// True, False, and numpy's.
bool bool_argument(nb::handle given, const char* name);
float float_argument(nb::handle given, const char* name);
std::string text_argument(nb::handle given, const char* name);
// A path as os.fsencode() gives it.
std::string path_argument(nb::handle given, const char* name);

// T is an integer, bool, float, std::string, or an enumeration or class of this module: of these last, members and
// instances only, no numbers.
template <typename T>
T argument(nb::handle given, const char* name) {
  if constexpr (std::is_same_v<T, bool>) {
    return bool_argument(given, name);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(integer_argument(given, name, 8 * sizeof(T)));
  } else if constexpr (std::is_same_v<T, float>) {
    return float_argument(given, name);
  } else if constexpr (std::is_same_v<T, std::string>) {
    return text_argument(given, name);
  } else {
    using Value = std::remove_reference_t<T>;
    using Found = std::conditional_t<std::is_enum_v<Value>, Value, Value*>;
    Found found{};
    if (given.is_none() || !nb::try_cast(given, found, false)) {
      wrong_type(name, "hexpert." + text_of(nb::type<Value>().attr("__name__")), given);
    }
    if constexpr (std::is_enum_v<Value>) {
      return found;
    } else {
      return *found;
    }
  }
}

template <typename T>
std::optional<T> optional_argument(nb::handle given, const char* name) {
  if (given.is_none()) return std::nullopt;
  return argument<T>(given, name);
}

}  // namespace hexpert::python
