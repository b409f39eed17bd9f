#include "io/json_text.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/io_support.hpp"

namespace hexpert::io {
namespace {

using Json = nlohmann::json;

// SAX, so that no tree is built and duplicate keys are seen. Every event is an error unless a
// reader says otherwise.
class StrictReader : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_unsigned(number_unsigned_t) override { return unexpected("a number"); }
  bool number_float(number_float_t, const string_t&) override {
    return unexpected("a number that is no 64-bit integer");
  }
  bool string(string_t&) override { return unexpected("a string"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool start_object(std::size_t) override { return unexpected("an object"); }
  bool start_array(std::size_t) override { return unexpected("an array"); }
  bool end_object() override { return true; }
  bool end_array() override { return true; }
  bool parse_error(std::size_t position,
                   const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    return fail("no valid JSON (UTF-8) at byte " + std::to_string(position));
  }

  const std::string& error() const { return error_; }

 protected:
  bool fail(std::string message) {
    if (error_.empty()) error_ = std::move(message);
    return false;
  }
  virtual std::string place() const = 0;

 private:
  bool unexpected(const char* what) { return fail(place() + ": unexpected " + what); }
  std::string error_;
};

class HeaderReader final : public StrictReader {
 public:
  bool start_object(std::size_t size) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTop;
        return true;
      case State::kTop:
        if (key_ == "__metadata__") {
          if (std::exchange(metadata_seen_, true)) return fail("__metadata__ occurs twice");
          state_ = State::kMetadata;
        } else {
          tensor_ = TensorInfo{};
          tensor_.name = key_;
          seen_ = {};
          state_ = State::kTensor;
        }
        return true;
      default:
        return StrictReader::start_object(size);
    }
  }

  bool key(string_t& name) override {
    if (state_ == State::kTensor) {
      for (std::size_t field = 0; field < kFields.size(); ++field) {
        if (name != kFields[field]) continue;
        if (std::exchange(seen_[field], true)) return fail(place() + ": " + name + " occurs twice");
        key_ = std::move(name);
        return true;
      }
      return fail(place() + ": unexpected key " + in_quotes(name));
    }
    key_ = std::move(name);
    return true;
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      if (!header.metadata.emplace(key_, std::move(value)).second) {
        return fail("__metadata__: key " + in_quotes(key_) + " occurs twice");
      }
      return true;
    }
    if (state_ == State::kTensor && key_ == kFields[0]) {
      tensor_.dtype = std::move(value);
      return true;
    }
    return StrictReader::string(value);
  }

  bool start_array(std::size_t size) override {
    if (state_ == State::kTensor && key_ != kFields[0]) {
      state_ = key_ == kFields[1] ? State::kShape : State::kOffsets;
      offsets_.clear();
      return true;
    }
    return StrictReader::start_array(size);
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ != State::kShape && state_ != State::kOffsets) {
      return StrictReader::number_unsigned(value);
    }
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return fail(place() + ": " + key_ + " holds " + std::to_string(value) +
                  ", which is past the 64-bit signed range");
    }
    (state_ == State::kShape ? tensor_.shape : offsets_).push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets) {
      if (offsets_.size() != 2) {
        return fail(place() + ": data_offsets: expected 2 numbers, got " +
                    std::to_string(offsets_.size()));
      }
      if (offsets_[0] > offsets_[1]) {
        return fail(place() + ": data_offsets: expected begin <= end, got " + shape_text(offsets_));
      }
      tensor_.offset = offsets_[0];
      tensor_.size_bytes = offsets_[1] - offsets_[0];
    }
    state_ = State::kTensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTensor) {
      for (std::size_t field = 0; field < kFields.size(); ++field) {
        if (!seen_[field]) return fail(place() + ": " + kFields[field] + " is missing");
      }
      header.tensors.push_back(std::move(tensor_));
    }
    state_ = State::kTop;
    return true;
  }

  SafetensorsHeader header;

 private:
  enum class State : uint8_t { kStart, kTop, kMetadata, kTensor, kShape, kOffsets };
  static constexpr std::array<const char*, 3> kFields = {"dtype", "shape", "data_offsets"};

  std::string place() const override {
    switch (state_) {
      case State::kStart:
        return "header";
      case State::kTop:
        return in_quotes(key_);
      case State::kMetadata:
        return "__metadata__ " + in_quotes(key_);
      default:
        return "tensor " + in_quotes(tensor_.name);
    }
  }

  State state_ = State::kStart;
  std::string key_;
  TensorInfo tensor_;
  std::array<bool, 3> seen_ = {};
  std::vector<int64_t> offsets_;
  bool metadata_seen_ = false;
};

class IndexReader final : public StrictReader {
 public:
  bool start_object(std::size_t size) override {
    if (depth_ == 1 && key_ == kWeightMap) {
      if (std::exchange(map_seen_, true)) return fail("weight_map occurs twice");
    } else if (in_map()) {
      return StrictReader::start_object(size);
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ == 1) key_.clear();
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ == 1 || in_map()) (depth_ == 1 ? key_ : entry_) = std::move(name);
    return true;
  }
  bool string(string_t& value) override {
    if (!in_map()) return value_outside() || StrictReader::string(value);
    if (value.empty() || value == "." || value == ".." || value.find('/') != std::string::npos ||
        value.find('\0') != std::string::npos) {
      return fail(place() + ": expected a file name without directories, got " + in_quotes(value));
    }
    if (!weight_map.emplace(entry_, std::move(value)).second) {
      return fail(place() + " occurs twice");
    }
    return true;
  }
  bool start_array(std::size_t size) override {
    if (!value_outside()) return StrictReader::start_array(size);
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool null() override { return value_outside() || StrictReader::null(); }
  bool boolean(bool value) override { return value_outside() || StrictReader::boolean(value); }
  bool number_integer(number_integer_t value) override {
    return value_outside() || StrictReader::number_integer(value);
  }
  bool number_unsigned(number_unsigned_t value) override {
    return value_outside() || StrictReader::number_unsigned(value);
  }
  bool number_float(number_float_t value, const string_t& text) override {
    return value_outside() || StrictReader::number_float(value, text);
  }

  bool complete() const { return map_seen_; }

  std::map<std::string, std::string> weight_map;

 private:
  static constexpr const char* kWeightMap = "weight_map";

  bool in_map() const { return depth_ == 2 && key_ == kWeightMap; }
  // Anything may stand in the rest of the index.
  bool value_outside() const { return depth_ >= 1 && key_ != kWeightMap; }
  std::string place() const override {
    return in_map()      ? "weight_map entry " + in_quotes(entry_)
           : depth_ == 0 ? "index"
                         : in_quotes(key_);
  }

  int64_t depth_ = 0;
  std::string key_;    // at depth 1
  std::string entry_;  // in weight_map
  bool map_seen_ = false;
};

// Why the text is refused, or "".
std::string read_json(const uint8_t* text, int64_t bytes, StrictReader& reader) {
  const auto* first = reinterpret_cast<const char*>(text);
  if (bytes == 0 || *first != '{') return "expected a JSON object";
  // The parser takes NUL for the end of its input and would skip what follows.
  if (std::memchr(first, 0, static_cast<std::size_t>(bytes)) != nullptr) return "holds a NUL byte";
  if (!Json::sax_parse(first, first + bytes, &reader)) return reader.error();
  return {};
}

// Bytes of a tensor from its dtype and shape; negative when the count of bits overflows or is no
// multiple of 8.
int64_t packed_bytes(const TensorInfo& tensor, int64_t bits) {
  int64_t total = bits;
  for (const int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(total, extent, &total)) return -1;
  }
  return total % 8 == 0 ? total / 8 : -1;
}

// The first violated rule of the data section, or "".
std::string check_layout(const std::vector<TensorInfo>& tensors, int64_t data_bytes) {
  std::vector<const TensorInfo*> order;
  order.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) {
    const std::string place = "tensor " + in_quotes(tensor.name) + ": ";
    if (tensor.offset + tensor.size_bytes > data_bytes) {
      return place + "ends at byte " + std::to_string(tensor.offset + tensor.size_bytes) +
             " of the data section, which has " + std::to_string(data_bytes) + " (truncated?)";
    }
    const int64_t bits = dtype_bits(tensor.dtype);
    const int64_t expected = packed_bytes(tensor, bits == 0 ? 8 : bits);
    if (expected < 0) {
      return place + "shape " + shape_text(tensor.shape) + " has no size in bytes";
    }
    if (bits != 0 && expected != tensor.size_bytes) {
      return place + "expected " + std::to_string(expected) + " bytes for " +
             shape_text(tensor.shape) + " " + tensor.dtype + ", got " +
             std::to_string(tensor.size_bytes);
    }
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->offset, a->size_bytes) < std::pair(b->offset, b->size_bytes);
  });
  int64_t end = 0;
  for (const TensorInfo* tensor : order) {
    if (tensor->offset != end) {
      return "tensor " + in_quotes(tensor->name) + ": expected to begin at byte " +
             std::to_string(end) + " of the data section, where the previous tensor ends, got " +
             std::to_string(tensor->offset) + (tensor->offset < end ? " (overlap)" : " (hole)");
    }
    end += tensor->size_bytes;
  }
  if (end != data_bytes) {
    return std::to_string(data_bytes - end) + " bytes follow the last tensor";
  }
  return {};
}

Status invalid(const std::string& file_name, const std::string& why) {
  return {ErrorCode::kInvalidFile, in_quotes(file_name) + ": " + why};
}

}  // namespace

int64_t dtype_bits(std::string_view dtype) {
  struct Entry {
    std::string_view name;
    int64_t bits;
  };
  static constexpr Entry kEntries[] = {
      {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
      {"I64", 64},        {"U64", 64},
  };
  for (const Entry& entry : kEntries) {
    if (entry.name == dtype) return entry.bits;
  }
  return 0;
}

Result<SafetensorsHeader> parse_safetensors_header(const std::string& file_name,
                                                   const uint8_t* file,
                                                   int64_t file_bytes) {
  constexpr int64_t kLengthBytes = 8;
  if (file_bytes < kLengthBytes) {
    return invalid(
        file_name,
        "expected a header length of 8 bytes, the file has " + std::to_string(file_bytes));
  }
  uint64_t length = 0;
  for (int64_t i = kLengthBytes; i-- > 0;)
    length = length << 8 | file[i];
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return invalid(file_name,
                   "header length: expected at most " + std::to_string(kMaxHeaderBytes) +
                       " bytes, got " + std::to_string(length));
  }
  const auto header_bytes = static_cast<int64_t>(length);
  if (header_bytes > file_bytes - kLengthBytes) {
    return invalid(file_name,
                   "header length is " + std::to_string(header_bytes) + ", but only " +
                       std::to_string(file_bytes - kLengthBytes) + " bytes follow (truncated?)");
  }
  HeaderReader reader;
  std::string why = read_json(file + kLengthBytes, header_bytes, reader);
  if (!why.empty()) return invalid(file_name, "header: " + why);
  SafetensorsHeader header = std::move(reader.header);
  header.data_offset = kLengthBytes + header_bytes;

  std::sort(header.tensors.begin(),
            header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(
      header.tensors.begin(), header.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
        return a.name == b.name;
      });
  if (twice != header.tensors.end()) {
    return invalid(file_name, "tensor " + in_quotes(twice->name) + " occurs twice");
  }
  why = check_layout(header.tensors, file_bytes - header.data_offset);
  if (!why.empty()) return invalid(file_name, why);
  return header;
}

Result<std::map<std::string, std::string>> parse_index(const std::string& file_name,
                                                       const uint8_t* text,
                                                       int64_t bytes) {
  if (bytes > kMaxHeaderBytes) {
    return invalid(file_name,
                   "index: expected at most " + std::to_string(kMaxHeaderBytes) + " bytes, got " +
                       std::to_string(bytes));
  }
  IndexReader reader;
  const std::string why = read_json(text, bytes, reader);
  if (!why.empty()) return invalid(file_name, "index: " + why);
  if (!reader.complete()) return invalid(file_name, "index: weight_map is missing");
  return std::move(reader.weight_map);
}

}  // namespace hexpert::io
