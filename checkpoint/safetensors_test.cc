#include "checkpoint/safetensors.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

// A header's text, of a file with `data_bytes` of data behind it.
absl::StatusOr<SafetensorsHeader> Parse(const std::string& text,
                                        int64_t data_bytes) {
  return ParseSafetensorsHeader(
      text, 8 + static_cast<int64_t>(text.size()) + data_bytes);
}

SafetensorsHeader MakeHeader() {
  SafetensorsHeader header;
  header.metadata = {{"format", "pt"}, {"quote", "\"\\\n"}, {"empty", ""}};
  header.tensors = {
      {"a", SafetensorsType::kF32, {2, 3}, 0, 24},
      {"empty", SafetensorsType::kF64, {0, 5}, 24, 24},
      {"scalar", SafetensorsType::kBF16, {}, 24, 26},
      {"\xc3\xa4/..", SafetensorsType::kF8E4M3, {7}, 26, 33},
  };
  return header;
}

void ExpectEqual(const SafetensorsHeader& a, const SafetensorsHeader& b) {
  EXPECT_EQ(a.metadata, b.metadata);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    EXPECT_EQ(a.tensors[i].name, b.tensors[i].name);
    EXPECT_EQ(a.tensors[i].type, b.tensors[i].type);
    EXPECT_EQ(a.tensors[i].shape, b.tensors[i].shape);
    EXPECT_EQ(a.tensors[i].begin, b.tensors[i].begin);
    EXPECT_EQ(a.tensors[i].end, b.tensors[i].end);
  }
}

TEST(SafetensorsTest, WhatIsWrittenIsRead) {
  for (const SafetensorsHeader& header : {MakeHeader(), SafetensorsHeader()}) {
    const absl::StatusOr<std::string> bytes =
        SerializeSafetensorsHeader(header);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(bytes->size() % 4096, 0);
    const int64_t file_bytes =
        static_cast<int64_t>(bytes->size()) + header.data_bytes();
    const absl::StatusOr<int64_t> length =
        SafetensorsHeaderLength(bytes->substr(0, 8), file_bytes);
    ASSERT_TRUE(length.ok()) << length.status();
    EXPECT_EQ(8 + *length, bytes->size());
    const absl::StatusOr<SafetensorsHeader> read =
        ParseSafetensorsHeader(bytes->substr(8), file_bytes);
    ASSERT_TRUE(read.ok()) << read.status();
    ExpectEqual(*read, header);
  }
}

// As another writer may have it: other order, spaces, escapes.
TEST(SafetensorsTest, ReadsWhatTheFormatAllows) {
  const absl::StatusOr<SafetensorsHeader> header = Parse(
      "{ \"b\" : {\"data_offsets\":[4,6],\"shape\":[1],\"dtype\":\"I16\"},\n"
      "\"\\u0061\":{\"dtype\":\"U32\",\"shape\":[],\"data_offsets\":[0,4]}, "
      "\"__metadata__\":{}}   ",
      6);
  ASSERT_TRUE(header.ok()) << header.status();
  SafetensorsHeader expected;
  expected.tensors = {{"a", SafetensorsType::kU32, {}, 0, 4},
                      {"b", SafetensorsType::kI16, {1}, 4, 6}};
  ExpectEqual(*header, expected);
}

TEST(SafetensorsTest, TypesHaveTheNamesOfTheFormat) {
  const struct {
    const char* name;
    int64_t bytes;
  } types[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1},
               {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
               {"BF16", 2},    {"I32", 4}, {"U32", 4}, {"F32", 4},
               {"F64", 8},     {"I64", 8}, {"U64", 8}};
  int number = 0;
  for (const auto& type : types) {
    const absl::StatusOr<SafetensorsHeader> header =
        Parse(absl::StrCat("{\"t\":{\"dtype\":\"", type.name,
                           "\",\"shape\":[3],\"data_offsets\":[0,",
                           3 * type.bytes, "]}}"),
              3 * type.bytes);
    ASSERT_TRUE(header.ok()) << type.name << ": " << header.status();
    EXPECT_EQ(static_cast<int>(header->tensors[0].type), number++);
    EXPECT_STREQ(Name(header->tensors[0].type), type.name);
    EXPECT_EQ(ByteSize(header->tensors[0].type), type.bytes);
  }
}

TEST(SafetensorsTest, EachRuleIsChecked) {
  const std::string t = "\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]";
  const struct {
    std::string text;
    const char* problem;
  } cases[] = {
      {"", "does not begin with {"},
      {" {}", "does not begin with {"},
      {"[]", "does not begin with {"},
      {"{} {}", "is no JSON"},
      {"{}\n", "does not end with"},
      {"{", "does not end with"},
      {"{}}", "is no JSON"},
      {"{\"a\":{" + t + "},}", "is no JSON"},
      {"{\"\xff\":{" + t + "}}", "is no JSON"},
      {"{\"\xc3\x28\":{" + t + "}}", "is no JSON"},
      {"{\"a\xed\xa0\x80\":{" + t + "}}", "is no JSON"},
      {"{\"a\":{" + t + "},\"a\":{" + t + "}}", "has \"a\" twice"},
      {"{\"a\":{" + t + "},\"\\u0061\":{" + t + "}}", "has \"a\" twice"},
      {"{\"\":{" + t + "}}", "has no name"},
      {"{\"a\\u0000b\":{" + t + "}}", "has a NUL"},
      {"{\"a\":null}", "has null"},
      {"{\"a\":[]}", "has an array"},
      {"{\"a\":3}", "has a number"},
      {"{\"a\":true}", "has true or false"},
      {"{\"a\":\"b\"}", "has a text"},
      {"{\"a\":{}}", "lacks a dtype"},
      {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,2]}}", "lacks a dtype"},
      {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,2]}}", "lacks a dtype"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}", "lacks a dtype"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0]}}",
       "lacks a dtype"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2,2]}}",
       "a third offset"},
      {"{\"a\":{" + t + ",\"dtype\":\"U8\"}}", "there already"},
      {"{\"a\":{" + t + ",\"more\":1}}", "has \"more\", which is unknown"},
      {"{\"a\":{\"dtype\":\"u8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
       "has the unknown type \"u8\""},
      {"{\"a\":{\"dtype\":8,\"shape\":[2],\"data_offsets\":[0,2]}}",
       "has a number"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":2,\"data_offsets\":[0,2]}}",
       "has a number"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[[2]],\"data_offsets\":[0,2]}}",
       "has an array"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-2],\"data_offsets\":[0,2]}}",
       "a negative number"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2.0],\"data_offsets\":[0,2]}}",
       "that is not whole"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9223372036854775808],"
       "\"data_offsets\":[0,2]}}",
       "beyond 63 bits"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[99999999999999999999],"
       "\"data_offsets\":[0,2]}}",
       "that is not whole"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],"
       "\"data_offsets\":[0,2]}}",
       "do not fit 64 bits"},
      {"{\"a\":{\"dtype\":\"U64\",\"shape\":[2305843009213693952],"
       "\"data_offsets\":[0,2]}}",
       "do not fit 64 bits"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,2]}}",
       "by its type and shape 3 bytes"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[2,0]}}",
       "begins at byte 2"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
       "begins at byte 1 of the data, where that before it ends at 0"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
       "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}",
       "begins at byte 0 of the data, where that before it ends at 1"},
      {"{}", "the tensors have 0 bytes of data, and the file 2"},
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}",
       "the tensors have 3 bytes of data, and the file 2"},
      {"{\"__metadata__\":[],\"a\":{" + t + "}}", "in __metadata__"},
      {"{\"__metadata__\":{\"k\":1},\"a\":{" + t + "}}", "in __metadata__"},
      {"{\"__metadata__\":{\"k\":{}},\"a\":{" + t + "}}", "in __metadata__"},
      {"{\"__metadata__\":{\"k\":\"\",\"k\":\"\"},\"a\":{" + t + "}}",
       "has \"k\" twice in __metadata__"},
      {"{\"__metadata__\":{},\"__metadata__\":{},\"a\":{" + t + "}}",
       "has \"__metadata__\" twice"},
  };
  for (const auto& c : cases) {
    const absl::Status status = Parse(c.text, 2).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << c.text;
    EXPECT_TRUE(absl::StrContains(status.message(), c.problem))
        << c.text << "\nexpected '" << c.problem << "', got " << status;
  }
  EXPECT_TRUE(Parse("{\"a\":{" + t + "}}", 2).ok());
}

TEST(SafetensorsTest, LengthsThatMakeNoSense) {
  const auto length = [](uint64_t value, int64_t file_bytes) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) {
      bytes.push_back(static_cast<char>(value >> (8 * i)));
    }
    return SafetensorsHeaderLength(bytes, file_bytes);
  };
  EXPECT_EQ(length(0x102, 1000).value(), 0x102);
  EXPECT_EQ(length(992, 1000).value(), 992);
  EXPECT_EQ(length(100'000'000, int64_t{1} << 40).value(), 100'000'000);
  for (const auto& bad :
       {length(993, 1000), length(100'000'001, int64_t{1} << 40),
        length(~uint64_t{0}, int64_t{1} << 40),
        length(uint64_t{1} << 63, int64_t{1} << 40), length(0, 7),
        SafetensorsHeaderLength("\1\0\0\0\0\0\0", 1000)}) {
    EXPECT_EQ(bad.status().code(), absl::StatusCode::kDataLoss);
  }
}

// As deep and as large as it may be: refused at once, or read in time.
TEST(SafetensorsTest, DeepAndLargeHeadersTakeNoTime) {
  const auto begin = std::chrono::steady_clock::now();
  std::string deep = "{\"a\":";
  deep += std::string(500'000, '[') + "}";
  EXPECT_FALSE(Parse(deep, 0).ok());
  std::string objects = "{";
  for (int i = 0; i < 100'000; ++i) objects += "\"a\":{";
  EXPECT_FALSE(Parse(objects + "}", 0).ok());
  EXPECT_FALSE(Parse("{\"" + std::string(500'000, 'x') + "\":1}", 0).ok());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

// Whatever is changed is either refused or still a header.
TEST(SafetensorsTest, ChangedBytesAreHarmless) {
  const std::string bytes = *SerializeSafetensorsHeader(MakeHeader());
  const std::string text = bytes.substr(8, bytes.find("}  ") - 8 + 1);
  int refused = 0;
  int read = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    for (const char c : {'\0', ' ', '"', '{', '}', '9', '\xff', ','}) {
      std::string changed = text;
      changed[i] = c;
      const absl::StatusOr<SafetensorsHeader> header = Parse(changed, 33);
      header.ok() ? ++read : ++refused;
      if (header.ok()) {
        EXPECT_EQ(header->data_bytes(), 33);
      }
    }
    EXPECT_FALSE(Parse(text.substr(0, i), 33).ok());
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(read, 0);
}

TEST(SafetensorsTest, WritesOnlyWhatCanBeRead) {
  const auto with = [](auto set) {
    SafetensorsHeader header = MakeHeader();
    set(header);
    return header;
  };
  const struct {
    SafetensorsHeader header;
    const char* problem;
  } cases[] = {
      {with([](auto& h) { h.tensors[1].name = "a"; }), "\"a\" is there twice"},
      {with([](auto& h) { h.tensors[1].name = ""; }), "has no name"},
      {with([](auto& h) { h.tensors[1].name = std::string("a\0b", 3); }),
       "has a NUL"},
      {with([](auto& h) { h.tensors[1].name = "__metadata__"; }),
       "has the name of the metadata"},
      {with([](auto& h) { h.tensors[1].name = "\xff"; }), "UTF-8"},
      {with([](auto& h) { h.metadata["\xff"] = ""; }), "UTF-8"},
      {with([](auto& h) { h.metadata["x"] = "\xff"; }), "UTF-8"},
      {with([](auto& h) {
         h.tensors[0].shape = {2, -3};
       }),
       "negative size"},
      {with([](auto& h) {
         h.tensors[0].shape = {2, 4};
       }),
       "32 bytes"},
      {with([](auto& h) { ++h.tensors[2].begin; }), "begins at byte 25"},
      {with([](auto& h) { h.metadata["x"] = std::string(100'000'000, 'x'); }),
       "expected at most 100000000"},
  };
  for (const auto& c : cases) {
    const absl::Status status = SerializeSafetensorsHeader(c.header).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.problem;
    EXPECT_TRUE(absl::StrContains(status.message(), c.problem))
        << "expected '" << c.problem << "', got " << status;
  }
}

}  // namespace
}  // namespace onepass
