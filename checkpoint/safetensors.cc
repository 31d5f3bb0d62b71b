#include "checkpoint/safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/json_text.h"
#include "nlohmann/json.hpp"

namespace onepass {
namespace {

struct TypeRow {
  SafetensorsType type;
  const char* name;
  int64_t bytes;
};

constexpr TypeRow kTypes[] = {
    {SafetensorsType::kBool, "BOOL", 1},
    {SafetensorsType::kU8, "U8", 1},
    {SafetensorsType::kI8, "I8", 1},
    {SafetensorsType::kF8E5M2, "F8_E5M2", 1},
    {SafetensorsType::kF8E4M3, "F8_E4M3", 1},
    {SafetensorsType::kI16, "I16", 2},
    {SafetensorsType::kU16, "U16", 2},
    {SafetensorsType::kF16, "F16", 2},
    {SafetensorsType::kBF16, "BF16", 2},
    {SafetensorsType::kI32, "I32", 4},
    {SafetensorsType::kU32, "U32", 4},
    {SafetensorsType::kF32, "F32", 4},
    {SafetensorsType::kF64, "F64", 8},
    {SafetensorsType::kI64, "I64", 8},
    {SafetensorsType::kU64, "U64", 8},
};

const TypeRow& Row(SafetensorsType type) {
  return kTypes[static_cast<size_t>(type)];
}

constexpr absl::string_view kMetadata = "__metadata__";

// What a message quotes of a name: it may be as long as the header.
std::string Quoted(absl::string_view name) {
  constexpr size_t kMost = 100;
  if (name.size() <= kMost) return absl::StrCat("\"", name, "\"");
  return absl::StrCat("\"", name.substr(0, kMost), "\"...");
}

absl::Status Malformed(absl::string_view problem) {
  return absl::DataLossError(absl::StrCat("safetensors header: ", problem));
}

// What is wrong with a name, if anything.
const char* ProblemOfName(absl::string_view name) {
  if (name.empty()) return "has no name";
  if (name.find('\0') != name.npos) return "has a NUL in its name";
  if (name == kMetadata) return "has the name of the metadata";
  return nullptr;
}

// What is wrong with the bytes of a tensor whose data is to begin at `begin`;
// empty where nothing is.
std::string ProblemOfData(const SafetensorsTensor& tensor, int64_t begin) {
  if (tensor.begin != begin) {
    return absl::StrCat("begins at byte ", tensor.begin,
                        " of the data, where that before it ends at ", begin);
  }
  int64_t bytes = ByteSize(tensor.type);
  bool fits = true;
  // A size of zero makes all zero, but the others must make sense, too.
  bool empty = false;
  for (const int64_t size : tensor.shape) {
    if (size < 0) return "has a negative size";
    empty |= size == 0;
    fits &= empty || !__builtin_mul_overflow(bytes, size, &bytes);
  }
  if (empty) bytes = 0;
  int64_t end;
  if (!fits || __builtin_add_overflow(tensor.begin, bytes, &end)) {
    return absl::StrCat("has the shape [", absl::StrJoin(tensor.shape, ", "),
                        "], whose bytes do not fit 64 bits");
  }
  if (end != tensor.end) {
    return absl::StrCat("has data from ", tensor.begin, " to ", tensor.end,
                        ", and by its type and shape ", bytes, " bytes");
  }
  return "";
}

// Takes a header apart as its text is read, so that no more is kept than is
// needed, and stops at the first thing that is out of place. Where it is:
//
//   kStart { kKeys "name": { kTensor "shape": [ kShape ], ... }, ... } kEnd
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  absl::Status status() const {
    if (!status_.ok()) return status_;
    return state_ == State::kEnd ? absl::OkStatus()
                                 : Malformed("is not an object");
  }
  SafetensorsHeader Take() { return std::move(header_); }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("true or false"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is not whole");
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool number_integer(number_integer_t) override {
    return Unexpected("a negative number");
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ != State::kShape && state_ != State::kOffsets) {
      return Unexpected("a number");
    }
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    if (value > kMost) return Unexpected("a number beyond 63 bits");
    std::vector<int64_t>& numbers =
        state_ == State::kShape ? *shape_ : *offsets_;
    if (state_ == State::kOffsets && numbers.size() == 2) {
      return Unexpected("a third offset");
    }
    numbers.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadataValue) {
      header_.metadata[key_] = std::move(value);
      state_ = State::kMetadata;
      return true;
    }
    if (state_ != State::kType) return Unexpected("a text");
    const auto row =
        std::find_if(std::begin(kTypes), std::end(kTypes),
                     [&](const TypeRow& row) { return row.name == value; });
    if (row == std::end(kTypes)) {
      return Fail(absl::StrCat("tensor ", Quoted(name_),
                               " has the unknown type ", Quoted(value)));
    }
    type_ = row->type;
    state_ = State::kTensor;
    return true;
  }

  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kKeys;
      return true;
    }
    if (state_ == State::kTensorValue) {
      state_ = State::kTensor;
      type_.reset();
      shape_.reset();
      offsets_.reset();
      return true;
    }
    if (state_ == State::kMetadataObject) {
      state_ = State::kMetadata;
      return true;
    }
    return Unexpected("an object");
  }

  bool key(string_t& value) override {
    if (state_ == State::kKeys) {
      if (!keys_.insert(value).second) {
        return Fail(absl::StrCat("has ", Quoted(value), " twice"));
      }
      if (value == kMetadata) {
        state_ = State::kMetadataObject;
        return true;
      }
      name_ = std::move(value);
      if (const char* problem = ProblemOfName(name_)) {
        return Fail(absl::StrCat("tensor ", Quoted(name_), " ", problem));
      }
      state_ = State::kTensorValue;
      return true;
    }
    if (state_ == State::kMetadata) {
      if (header_.metadata.count(value) > 0) {
        return Fail(
            absl::StrCat("has ", Quoted(value), " twice in ", kMetadata));
      }
      key_ = std::move(value);
      state_ = State::kMetadataValue;
      return true;
    }
    // Of a tensor.
    if (value == "dtype" && !type_.has_value()) {
      state_ = State::kType;
    } else if (value == "shape" && !shape_.has_value()) {
      state_ = State::kShapeArray;
    } else if (value == "data_offsets" && !offsets_.has_value()) {
      state_ = State::kOffsetsArray;
    } else {
      return Fail(absl::StrCat("tensor ", Quoted(name_), " has ", Quoted(value),
                               ", which is unknown or there already"));
    }
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kShapeArray) {
      shape_.emplace();
      state_ = State::kShape;
      return true;
    }
    if (state_ == State::kOffsetsArray) {
      offsets_.emplace();
      state_ = State::kOffsets;
      return true;
    }
    return Unexpected("an array");
  }

  bool end_array() override {
    state_ = State::kTensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kKeys) {
      state_ = State::kEnd;
      return true;
    }
    if (state_ == State::kTensor) {
      if (!type_.has_value() || !shape_.has_value() || !offsets_.has_value() ||
          offsets_->size() != 2) {
        return Fail(absl::StrCat(
            "tensor ", Quoted(name_),
            " lacks a dtype, a shape or a data_offsets of two numbers"));
      }
      header_.tensors.push_back({std::move(name_), *type_, *std::move(shape_),
                                 (*offsets_)[0], (*offsets_)[1]});
    }
    state_ = State::kKeys;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // It quotes what it read last, whatever the length.
    constexpr size_t kMostBytes = 200;
    return Fail(
        absl::StrCat("is no JSON at byte ", position, ": ",
                     absl::string_view(error.what()).substr(0, kMostBytes)));
  }

 private:
  enum class State {
    kStart,
    kKeys,
    kTensorValue,
    kTensor,
    kType,
    kShapeArray,
    kShape,
    kOffsetsArray,
    kOffsets,
    kMetadataObject,
    kMetadata,
    kMetadataValue,
    kEnd,
  };

  bool Unexpected(absl::string_view what) {
    switch (state_) {
      case State::kStart:
        return Fail(absl::StrCat("is ", what, ", expected an object"));
      case State::kMetadataObject:
      case State::kMetadata:
      case State::kMetadataValue:
        return Fail(absl::StrCat("has ", what, " in ", kMetadata,
                                 ", expected texts by texts"));
      default:
        return Fail(
            absl::StrCat("tensor ", Quoted(name_), " has ", what,
                         ", expected a dtype, a shape and data_offsets"));
    }
  }

  bool Fail(absl::string_view problem) {
    status_.Update(Malformed(problem));
    return false;
  }

  State state_ = State::kStart;
  absl::Status status_;
  SafetensorsHeader header_;
  absl::flat_hash_set<std::string> keys_;
  std::string key_;  // of the metadata
  // Of the tensor that is being read.
  std::string name_;
  std::optional<SafetensorsType> type_;
  std::optional<std::vector<int64_t>> shape_;
  std::optional<std::vector<int64_t>> offsets_;
};

}  // namespace

const char* Name(SafetensorsType type) { return Row(type).name; }

int64_t ByteSize(SafetensorsType type) { return Row(type).bytes; }

absl::StatusOr<int64_t> SafetensorsHeaderLength(absl::string_view first_bytes,
                                                int64_t file_bytes) {
  if (first_bytes.size() < static_cast<size_t>(kSafetensorsLengthBytes) ||
      file_bytes < kSafetensorsLengthBytes) {
    return Malformed(absl::StrCat("the file has ", file_bytes,
                                  " bytes, expected at least ",
                                  kSafetensorsLengthBytes));
  }
  uint64_t length = 0;
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    length |= uint64_t{static_cast<uint8_t>(first_bytes[i])} << (8 * i);
  }
  if (length > static_cast<uint64_t>(kMostSafetensorsHeaderBytes) ||
      static_cast<int64_t>(length) > file_bytes - kSafetensorsLengthBytes) {
    return Malformed(
        absl::StrCat("is said to have ", length, " bytes, expected at most ",
                     std::min(kMostSafetensorsHeaderBytes,
                              file_bytes - kSafetensorsLengthBytes)));
  }
  return static_cast<int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view text,
                                                         int64_t file_bytes) {
  // JSON itself would allow space before it.
  if (text.empty() || text.front() != '{') {
    return Malformed("does not begin with {");
  }
  // And other space than this after it.
  absl::string_view object = text;
  while (object.back() == ' ') object.remove_suffix(1);
  if (object.back() != '}') return Malformed("does not end with } and spaces");
  HeaderReader reader;
  nlohmann::json::sax_parse(object.begin(), object.end(), &reader);
  if (absl::Status status = reader.status(); !status.ok()) return status;

  SafetensorsHeader header = reader.Take();
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return std::tie(a.begin, a.end, a.name) <
                     std::tie(b.begin, b.end, b.name);
            });
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    const std::string problem = ProblemOfData(tensor, end);
    if (!problem.empty()) {
      return Malformed(
          absl::StrCat("tensor ", Quoted(tensor.name), " ", problem));
    }
    end = tensor.end;
  }
  const int64_t data_bytes =
      file_bytes - kSafetensorsLengthBytes - static_cast<int64_t>(text.size());
  if (end != data_bytes) {
    return Malformed(absl::StrCat("the tensors have ", end,
                                  " bytes of data, and the file ", data_bytes));
  }
  return header;
}

absl::StatusOr<std::string> SerializeSafetensorsHeader(
    const SafetensorsHeader& header) {
  const auto invalid = [](const SafetensorsTensor& tensor,
                          absl::string_view problem) {
    return absl::InvalidArgumentError(absl::StrCat(
        "safetensors: tensor ", Quoted(tensor.name), " ", problem));
  };
  absl::flat_hash_set<absl::string_view> names;
  std::string text = "{";
  if (!header.metadata.empty()) {
    AppendJsonString(kMetadata, &text);
    text.push_back(':');
    char before = '{';
    for (const auto& [key, value] : header.metadata) {
      text.push_back(std::exchange(before, ','));
      bool utf8 = AppendJsonString(key, &text);
      text.push_back(':');
      utf8 &= AppendJsonString(value, &text);
      if (!utf8) {
        return absl::InvalidArgumentError(absl::StrCat(
            "safetensors: the metadata ", Quoted(key), " is no UTF-8"));
      }
    }
    text.push_back('}');
  }
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (const char* problem = ProblemOfName(tensor.name)) {
      return invalid(tensor, problem);
    }
    if (!names.insert(tensor.name).second) {
      return invalid(tensor, "is there twice");
    }
    const std::string problem = ProblemOfData(tensor, end);
    if (!problem.empty()) return invalid(tensor, problem);
    end = tensor.end;
    if (text.size() > 1) text.push_back(',');
    if (!AppendJsonString(tensor.name, &text)) {
      return invalid(tensor, "is no UTF-8");
    }
    absl::StrAppend(&text, ":{\"dtype\":\"", Name(tensor.type),
                    "\",\"shape\":");
    AppendJsonIntegers(tensor.shape, &text);
    absl::StrAppend(&text, ",\"data_offsets\":");
    AppendJsonIntegers({tensor.begin, tensor.end}, &text);
    text.push_back('}');
  }
  text.push_back('}');
  const int64_t used =
      kSafetensorsLengthBytes + static_cast<int64_t>(text.size());
  text.append((kSafetensorsAlignment - used % kSafetensorsAlignment) %
                  kSafetensorsAlignment,
              ' ');
  if (static_cast<int64_t>(text.size()) > kMostSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors: the header has ", text.size(),
                     " bytes, expected at most ", kMostSafetensorsHeaderBytes));
  }
  std::string bytes;
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    bytes.push_back(static_cast<char>(text.size() >> (8 * i)));
  }
  return bytes + text;
}

}  // namespace onepass
