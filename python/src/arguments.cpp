#include "arguments.hpp"

#include <fmt/format.h>

#include "arrays.hpp"

namespace hexpert::python {

std::string text_of(nb::handle object) {
  const nb::str text(object);
  const auto bytes =
      nb::steal<nb::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {bytes.c_str(), bytes.size()};
}

std::string type_text(nb::handle type) {
  const std::string module = text_of(nb::object(type.attr("__module__")));
  return (module == "builtins" ? "" : module + ".") +
         text_of(nb::object(type.attr("__qualname__")));
}

std::string given_text(nb::handle given) {
  if (given.is_none()) return "None";
  for (PyTypeObject* shown : {&PyLong_Type, &PyFloat_Type, &PyUnicode_Type, &PyBytes_Type}) {
    if (!PyObject_TypeCheck(given.ptr(), shown)) continue;
    constexpr size_t kShort = 200;
    const auto value = nb::steal(PyObject_Repr(given.ptr()));
    if (!value.is_valid()) {  // an integer of thousands of digits
      if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw nb::python_error();
      PyErr_Clear();
    }
    if (value.is_valid() && nb::len(value) <= kShort) return text_of(value);
  }
  return type_text(given.type());
}

void wrong_type(const char* name, const std::string& wanted, nb::handle given) {
  const std::string text = fmt::format("{}: expected {}, got {}", name, wanted, given_text(given));
  throw nb::type_error(text.c_str());
}

void wrong_value(const char* name, const std::string& wanted, nb::handle given) {
  raise({ErrorCode::kInvalidArgument,
         fmt::format("{}: expected {}, got {}", name, wanted, given_text(given))});
}

namespace {

// After a conversion that failed: a TypeError is put into words of ours, anything else is raised.
void clear_type_error() {
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
  PyErr_Clear();
}

}  // namespace

nb::object index_argument(nb::handle given, const char* name, const char* wanted) {
  auto index = nb::steal(PyNumber_Index(given.ptr()));
  if (!index.is_valid()) {
    clear_type_error();
    wrong_type(name, wanted, given);
  }
  return index;
}

int64_t integer_argument(nb::handle given, const char* name, int bits) {
  const nb::object index = index_argument(given, name, "an int");
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  const int64_t sign = value >> (bits - 1);
  if (overflow != 0 || (sign != 0 && sign != -1)) {
    wrong_value(name, fmt::format("an int of {} bits", bits), given);
  }
  return value;
}

bool bool_argument(nb::handle given, const char* name) {
  if (!nb::isinstance<nb::bool_>(given)) {
    const std::string type = type_text(given.type());
    if (type != "numpy.bool" && type != "numpy.bool_") wrong_type(name, "True or False", given);
  }
  const int truth = PyObject_IsTrue(given.ptr());
  if (truth < 0) throw nb::python_error();
  return truth == 1;
}

float float_argument(nb::handle given, const char* name) {
  const double value = PyFloat_AsDouble(given.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError) != 0) {
      PyErr_Clear();
      wrong_value(name, "a float of 64 bits", given);
    }
    clear_type_error();
    wrong_type(name, "a float", given);
  }
  return static_cast<float>(value);
}

std::string text_argument(nb::handle given, const char* name) {
  if (!nb::isinstance<nb::str>(given)) wrong_type(name, "a str", given);
  return text_of(given);
}

std::string path_argument(nb::handle given, const char* name) {
  const bool is_path = nb::isinstance<nb::str>(given) || nb::isinstance<nb::bytes>(given) ||
                       nb::hasattr(given.type(), "__fspath__");
  if (!is_path) wrong_type(name, "str, bytes or os.PathLike", given);
  const auto path = nb::steal(PyOS_FSPath(given.ptr()));  // raises what __fspath__ raises
  if (!path.is_valid()) throw nb::python_error();
  PyObject* converted = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &converted) == 0) {
    if (PyErr_ExceptionMatches(PyExc_ValueError) == 0) throw nb::python_error();
    PyErr_Clear();  // UnicodeEncodeError is a ValueError
    wrong_value(name, "a path without NUL that the file system's encoding has", given);
  }
  const auto bytes = nb::steal<nb::bytes>(converted);
  return {bytes.c_str(), bytes.size()};
}

}  // namespace hexpert::python
