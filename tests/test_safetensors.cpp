// Safetensors: what is read back, what is refused and in which words, what the writer leaves.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "files.hpp"
#include "hexpert/safetensors.hpp"
#include "io/json_text.hpp"

namespace hexpert {
namespace {

using test::raw_safetensors;
using test::TempDir;
using test::write_bytes;

std::string entry(const std::string& name,
                  const std::string& dtype,
                  const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
  const TempDir dir;
  const std::string header =
      "{\"__metadata__\":{\"format\":\"pt\"}," + entry("b", "BF16", "[2,3]", "[4,16]") + "," +
      entry("a", "F32", "[]", "[0,4]") + "," + entry("empty", "I64", "[0,5]", "[16,16]") + "}  ";
  write_bytes(dir / "x.safetensors", raw_safetensors(header, 16));
  const Result<SafetensorsFile> file = SafetensorsFile::open(dir / "x.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  ASSERT_EQ(file->tensors().size(), 3U);
  EXPECT_EQ(file->tensors()[0].name, "a");
  EXPECT_EQ(file->metadata().at("format"), "pt");
  EXPECT_EQ(file->find("b")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file->find("c"), nullptr);
  EXPECT_EQ(file->tensor("c").status().code(), ErrorCode::kNotFound);
  const Result<HostTensor> loaded = file->load("b");
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(loaded->view().data) % 64, 0U);
  EXPECT_EQ(loaded->view().as<uint16_t>()[5], 0x0101);
  EXPECT_EQ(file->load("empty")->view().num_elements(), 0);
}

TEST(Safetensors, UnknownDtypeIsListedButNotRead) {
  const TempDir dir;
  const std::string header = "{" + entry("a", "FUTURE3", "[7]", "[0,3]") + "," +
                             entry("b", "F4", "[4]", "[3,5]") + "," +
                             entry("c", "F64", "[1]", "[5,13]") + "}";
  write_bytes(dir / "x.safetensors", raw_safetensors(header, 13));
  const Result<SafetensorsFile> file = SafetensorsFile::open(dir / "x.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(file->tensor("a").status().code(), ErrorCode::kInvalidDtype);
  EXPECT_EQ(file->load("c").status().code(), ErrorCode::kInvalidDtype);
}

TEST(Safetensors, MisalignedViewIsRefusedAndLoadCopies) {
  const TempDir dir;
  const std::string header =
      "{" + entry("a", "U8", "[1]", "[0,1]") + "," + entry("b", "F32", "[1]", "[1,5]") + "}";
  write_bytes(dir / "x.safetensors", raw_safetensors(header, 5));
  const SafetensorsFile file = SafetensorsFile::open(dir / "x.safetensors").value();
  const int bad = static_cast<int>(!file.tensor("b").ok());
  EXPECT_EQ(bad, static_cast<int>((8 + header.size() + 1) % 4 != 0));
  EXPECT_EQ(test::f32_bits(file.load("b").value().as<float>()[0]), 0x01010101U);
}

struct BadFile {
  const char* name;
  std::string bytes;
  const char* words;  // in the message
};

std::vector<BadFile> bad_files() {
  const auto one = [](const std::string& text, std::size_t data = 0) {
    return raw_safetensors("{" + text + "}", data);
  };
  const std::string deep(100000, '[');
  std::string long_length = raw_safetensors("{}", 0);
  long_length[7] = '\x7F';
  std::string negative_length = raw_safetensors("{}", 0);
  for (int i = 0; i < 8; ++i)
    negative_length[static_cast<std::size_t>(i)] = '\xFF';
  std::string truncated = one(entry("a", "U8", "[4]", "[0,4]"), 4);
  truncated.resize(20);
  std::string over_limit = raw_safetensors("{}", 0);
  over_limit[3] = '\x06';  // 100663298
  return {
      {"empty", "", "header length of 8 bytes"},
      {"seven_bytes", std::string(7, '\0'), "header length of 8 bytes"},
      {"zero_length", raw_safetensors("", 0), "expected a JSON object"},
      {"huge_length", long_length, "at most 100000000"},
      {"all_ones_length", negative_length, "at most 100000000"},
      {"length_over_limit", over_limit, "at most 100000000"},
      {"truncated_header", truncated, "only 12 bytes follow"},
      {"no_object", raw_safetensors("[]", 0), "expected a JSON object"},
      {"leading_space", raw_safetensors(" {}", 0), "expected a JSON object"},
      {"byte_order_mark", raw_safetensors("\xEF\xBB\xBF{}", 0), "expected a JSON object"},
      {"unfinished", raw_safetensors("{\"a\":", 0), "no valid JSON"},
      {"two_values", raw_safetensors("{}{}", 0), "no valid JSON"},
      {"nul", raw_safetensors(std::string("{}\0x", 4), 0), "NUL"},
      {"not_utf8", one(entry("a\xFF", "U8", "[1]", "[0,1]"), 1), "UTF-8"},
      {"overlong_utf8", one(entry("a\xC0\x80", "U8", "[1]", "[0,1]"), 1), "UTF-8"},
      {"surrogate", one(entry("a\\ud800", "U8", "[1]", "[0,1]"), 1), "no valid JSON"},
      {"deep_array", one("\"a\":" + deep), "unexpected an array"},
      {"deep_shape", one("\"a\":{\"shape\":" + deep), "unexpected an array"},
      {"tensor_is_number", one("\"a\":1"), "unexpected a number"},
      {"tensor_is_null", one("\"a\":null"), "unexpected null"},
      {"nested_object", one("\"a\":{\"dtype\":{}}"), "unexpected an object"},
      {"unknown_key", one("\"a\":{\"stride\":1}"), "unexpected key 'stride'"},
      {"no_dtype", one("\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}", 1), "dtype is missing"},
      {"no_shape", one("\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}", 1), "shape is missing"},
      {"no_offsets", one("\"a\":{\"dtype\":\"U8\",\"shape\":[1]}", 1), "data_offsets is missing"},
      {"dtype_twice", one("\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}"), "dtype occurs twice"},
      {"name_twice",
       one(entry("a", "U8", "[1]", "[0,1]") + "," + entry("a", "U8", "[1]", "[1,2]"), 2),
       "'a' occurs twice"},
      {"escaped_name_twice",
       one(entry("a", "U8", "[1]", "[0,1]") + "," + entry("\\u0061", "U8", "[1]", "[1,2]"), 2),
       "'a' occurs twice"},
      {"metadata_twice",
       one("\"__metadata__\":{},\"__metadata__\":{}"),
       "__metadata__ occurs twice"},
      {"metadata_key_twice", one("\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}"), "'k' occurs twice"},
      {"metadata_number", one("\"__metadata__\":{\"k\":1}"), "unexpected a number"},
      {"metadata_string", one("\"__metadata__\":\"x\""), "unexpected a string"},
      {"negative_offset", one(entry("a", "U8", "[1]", "[-1,0]"), 1), "negative"},
      {"float_offset", one(entry("a", "U8", "[1]", "[0.0,1]"), 1), "no 64-bit integer"},
      {"huge_offset",
       one(entry("a", "U8", "[1]", "[0,9223372036854775808]"), 1),
       "64-bit signed range"},
      {"bigger_offset",
       one(entry("a", "U8", "[1]", "[0,99999999999999999999]"), 1),
       "no 64-bit integer"},
      {"one_offset", one(entry("a", "U8", "[1]", "[0]"), 1), "expected 2 numbers, got 1"},
      {"three_offsets", one(entry("a", "U8", "[1]", "[0,1,2]"), 1), "expected 2 numbers, got 3"},
      {"reversed_offsets", one(entry("a", "U8", "[1]", "[1,0]"), 1), "begin <= end"},
      {"negative_extent", one(entry("a", "U8", "[-1]", "[0,1]"), 1), "negative"},
      {"extents_overflow",
       one(entry("a", "U8", "[4294967296,4294967296]", "[0,1]"), 1),
       "no size in bytes"},
      {"extents_overflow_with_zero",
       one(entry("a", "U8", "[4294967296,4294967296,4294967296,0]", "[0,0]")),
       "no size in bytes"},
      {"half_byte", one(entry("a", "F4", "[3]", "[0,2]"), 2), "no size in bytes"},
      {"past_the_end", one(entry("a", "U8", "[9]", "[0,9]"), 8), "truncated"},
      {"far_past_the_end",
       one(entry("a", "U8", "[1]", "[9223372036854775806,9223372036854775807]"), 1),
       "truncated"},
      {"size_too_small", one(entry("a", "F32", "[2]", "[0,4]"), 4), "expected 8 bytes"},
      {"size_too_large", one(entry("a", "BF16", "[2]", "[0,8]"), 8), "expected 4 bytes"},
      {"hole",
       one(entry("a", "U8", "[1]", "[0,1]") + "," + entry("b", "U8", "[1]", "[2,3]"), 3),
       "(hole)"},
      {"hole_at_start", one(entry("a", "U8", "[1]", "[1,2]"), 2), "(hole)"},
      {"overlap",
       one(entry("a", "U8", "[2]", "[0,2]") + "," + entry("b", "U8", "[2]", "[1,3]"), 3),
       "(overlap)"},
      {"same_range",
       one(entry("a", "U8", "[2]", "[0,2]") + "," + entry("b", "U8", "[2]", "[0,2]"), 2),
       "(overlap)"},
      {"bytes_after_data", one(entry("a", "U8", "[1]", "[0,1]"), 9), "8 bytes follow"},
      {"bytes_without_tensors", raw_safetensors("{}", 1), "1 bytes follow"},
  };
}

TEST(Safetensors, RefusesBadFilesNamingTheFile) {
  const TempDir dir;
  for (const BadFile& bad : bad_files()) {
    const std::string path = dir / (std::string(bad.name) + ".safetensors");
    write_bytes(path, bad.bytes);
    const Result<SafetensorsFile> file = SafetensorsFile::open(path);
    ASSERT_FALSE(file.ok()) << bad.name;
    EXPECT_EQ(file.status().code(), ErrorCode::kInvalidFile) << bad.name;
    EXPECT_NE(file.status().message().find(bad.words), std::string::npos)
        << bad.name << ": " << file.status().message();
    EXPECT_NE(file.status().message().find(bad.name), std::string::npos) << bad.name;
  }
}

// No truncation of a good file may be taken for a whole one, or read out of bounds.
TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string good = raw_safetensors(
      "{" + entry("a", "BF16", "[2,2]", "[0,8]") + "," + entry("b", "F32", "[1]", "[8,12]") + "}",
      12);
  for (std::size_t size = 0; size < good.size(); ++size) {
    const std::vector<uint8_t> bytes(good.begin(), good.begin() + static_cast<int64_t>(size));
    EXPECT_FALSE(io::parse_safetensors_header("x", bytes.data(), static_cast<int64_t>(size)).ok())
        << size;
  }
}

// One changed byte may be harmless (in a name); it must never crash or break the layout rules.
TEST(Safetensors, EveryChangedByteIsHandled) {
  const std::string good = raw_safetensors(
      "{\"__metadata__\":{\"a\":\"b\"}," + entry("a", "BF16", "[2,2]", "[0,8]") + "}", 8);
  for (std::size_t at = 0; at < good.size() - 8; ++at) {
    for (int value = 0; value < 256; ++value) {
      std::vector<uint8_t> bytes(good.begin(), good.end());
      bytes[at] = static_cast<uint8_t>(value);
      const auto header =
          io::parse_safetensors_header("x", bytes.data(), static_cast<int64_t>(bytes.size()));
      if (!header.ok()) continue;
      for (const TensorInfo& tensor : header->tensors) {
        ASSERT_LE(header->data_offset + tensor.offset + tensor.size_bytes,
                  static_cast<int64_t>(bytes.size()));
      }
    }
  }
}

TEST(Safetensors, MessagesEscapeHostileNames) {
  const TempDir dir;
  const std::string name = "a\\u001b[31m" + std::string(5000, 'x');
  write_bytes(dir / "x.safetensors",
              raw_safetensors("{" + entry(name, "U8", "[1]", "[0,2]") + "}", 2));
  const std::string message = SafetensorsFile::open(dir / "x.safetensors").status().message();
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_NE(message.find("\\x1b"), std::string::npos);
  EXPECT_LT(message.size(), 800U);
}

TEST(Safetensors, RefusesWhatIsNoRegularFile) {
  const TempDir dir;
  EXPECT_EQ(SafetensorsFile::open(dir / "none").status().code(), ErrorCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::open(dir.path()).status().code(), ErrorCode::kIoError);
  ASSERT_EQ(::mkfifo((dir / "fifo").c_str(), 0600), 0);
  EXPECT_EQ(SafetensorsFile::open(dir / "fifo").status().code(), ErrorCode::kIoError);
}

TEST(SafetensorsWriter, RoundTripAlignsWideElements) {
  const TempDir dir;
  test::FileTensors tensors;
  tensors["codes"] = {"U8", {3}, "abc"};
  tensors["scalar"] = test::f32_tensor({}, {1.5F});
  tensors["wide \"quoted\" \xC3\xA9"] = {"I64", {1}, std::string(8, '\2')};
  tensors["none"] = {"BF16", {0, 4}, ""};
  test::write_safetensors(dir / "x.safetensors", tensors, {{"k", "line\n"}});
  const Result<SafetensorsFile> file = SafetensorsFile::open(dir / "x.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(file->metadata().at("k"), "line\n");
  EXPECT_EQ(file->tensors().size(), 4U);
  for (const auto& [name, tensor] : tensors) {
    const TensorInfo* info = file->find(name);
    ASSERT_NE(info, nullptr) << name;
    EXPECT_EQ(info->shape, tensor.shape);
    EXPECT_EQ(test::bytes_of(file->data(*info), tensor.bytes.size()), tensor.bytes);
    EXPECT_TRUE(file->tensor(name).ok()) << file->tensor(name).status().to_string();
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "x.safetensors.partial"));
}

TEST(SafetensorsWriter, UnfinishedLeavesNothing) {
  const TempDir dir;
  {
    SafetensorsWriter writer =
        SafetensorsWriter::create(dir / "x.safetensors", {{"a", "U8", {4}}}).value();
    EXPECT_TRUE(std::filesystem::exists(dir / "x.safetensors.partial"));
    EXPECT_TRUE(writer.write("a", "12", 2).ok());
    EXPECT_EQ(writer.finish().code(), ErrorCode::kInvalidArgument);
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

// Until it is whole, the file under construction is none that could be read.
TEST(SafetensorsWriter, PartialFileIsNoSafetensorsFile) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  SafetensorsWriter writer = SafetensorsWriter::create(path, {{"a", "U8", {3}}}).value();
  EXPECT_EQ(SafetensorsFile::open(path + ".partial").status().code(), ErrorCode::kInvalidFile);
  ASSERT_TRUE(writer.write("a", "abc", 3).ok());
  EXPECT_EQ(SafetensorsFile::open(path + ".partial").status().code(), ErrorCode::kInvalidFile);
  ASSERT_TRUE(writer.finish().ok());
  EXPECT_EQ(SafetensorsFile::open(path)->load("a")->as<uint8_t>()[2], 'c');
}

TEST(SafetensorsWriter, RefusesWrongUse) {
  const TempDir dir;
  const auto create = [&](const std::vector<TensorSpec>& specs) {
    return SafetensorsWriter::create(dir / "x.safetensors", specs).status().code();
  };
  EXPECT_EQ(create({{"a", "U8", {1}}, {"a", "U8", {1}}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(create({{"a", "U9", {1}}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(create({{"a", "U8", {-1}}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(create({{"a\xFF", "U8", {1}}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(create({{"__metadata__", "U8", {1}}}), ErrorCode::kInvalidArgument);
  EXPECT_EQ(create({{"a", "U8", {int64_t{1} << 40, int64_t{1} << 40}}}),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsWriter::create(dir / "no/x.safetensors", {}).status().code(),
            ErrorCode::kNotFound);
  SafetensorsWriter writer =
      SafetensorsWriter::create(dir / "x.safetensors", {{"a", "U8", {4}}}).value();
  EXPECT_EQ(writer.write("b", "1", 1).code(), ErrorCode::kNotFound);
  EXPECT_EQ(writer.write("a", "12345", 5).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(writer.write("a", "1", 1, INT64_MAX).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(writer.write("a", nullptr, 1).code(), ErrorCode::kInvalidArgument);
  // Only one writer at a time.
  EXPECT_EQ(SafetensorsWriter::create(dir / "x.safetensors", {}).status().code(),
            ErrorCode::kIoError);
}

TEST(Index, ReadsTheWeightMapAmongOtherThings) {
  const std::string text =
      R"({"metadata":{"total_size":1,"x":[{"weight_map":{"b":[1.5,null,true,-1]}}]},)"
      R"("weight_map":{"a":"m-1.safetensors"},"z":"s"})";
  const auto index = io::parse_index(
      "x", reinterpret_cast<const uint8_t*>(text.data()), static_cast<int64_t>(text.size()));
  ASSERT_TRUE(index.ok()) << index.status().to_string();
  EXPECT_EQ(*index, (std::map<std::string, std::string>{{"a", "m-1.safetensors"}}));
}

TEST(Index, RefusesBadTexts) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "JSON object"},
      {"[]", "JSON object"},
      {"{}", "weight_map is missing"},
      {R"({"weight_map":[]})", "unexpected an array"},
      {R"({"weight_map":"a"})", "unexpected a string"},
      {R"({"weight_map":{"a":1}})", "unexpected a number"},
      {R"({"weight_map":{"a":{}}})", "unexpected an object"},
      {R"({"weight_map":{"a":["b"]}})", "unexpected an array"},
      {R"({"weight_map":{"a":"b","a":"b"}})", "occurs twice"},
      {R"({"weight_map":{},"weight_map":{}})", "occurs twice"},
      {R"({"weight_map":{"a":"../b"}})", "without directories"},
      {R"({"weight_map":{"a":"/etc/passwd"}})", "without directories"},
      {R"({"weight_map":{"a":".."}})", "without directories"},
      {R"({"weight_map":{"a":""}})", "without directories"},
      {R"({"weight_map":{"a":"b\u0000c"}})", "without directories"},
      {R"({"weight_map":{"a":"b"})", "no valid JSON"},
  };
  for (const auto& [text, words] : cases) {
    const auto index = io::parse_index("model.index.json",
                                       reinterpret_cast<const uint8_t*>(text),
                                       static_cast<int64_t>(std::strlen(text)));
    ASSERT_FALSE(index.ok()) << text;
    EXPECT_EQ(index.status().code(), ErrorCode::kInvalidFile) << text;
    EXPECT_NE(index.status().message().find(words), std::string::npos)
        << text << ": " << index.status().message();
  }
}

}  // namespace
}  // namespace hexpert
