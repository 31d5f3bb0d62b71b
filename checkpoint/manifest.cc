#include "checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "checkpoint/publish.h"
#include "checkpoint/safetensors.h"
#include "dispatch/return_if_error.h"
#include "dispatch/state.h"
#include "xxhash.h"

namespace onepass {
namespace {

using checkpoint::Chunk;
using checkpoint::DataFile;
using checkpoint::File;
using checkpoint::Group;
using checkpoint::Index;
using checkpoint::LossScale;
using checkpoint::Manifest;
using checkpoint::RankIndex;
using checkpoint::Tensor;

// A rule is broken. Where it is stands before the problem: In() adds it.
template <typename... Parts>
absl::Status Broken(const Parts&... problem) {
  return absl::InvalidArgumentError(absl::StrCat(problem...));
}

absl::Status In(const char* field, const absl::Status& status) {
  return status.ok() ? status : Broken(field, ".", status.message());
}

absl::Status In(const char* list, int i, const absl::Status& status) {
  return status.ok() ? status : Broken(list, "[", i, "].", status.message());
}

absl::Status Damaged(absl::string_view file, absl::string_view problem) {
  return absl::DataLossError(absl::StrCat(file, ": ", problem));
}

absl::Status Damaged(absl::string_view file, const absl::Status& status) {
  return status.ok() ? status : Damaged(file, status.message());
}

// What an error quotes of a name, whatever that is.
std::string Quoted(absl::string_view name) {
  constexpr size_t kMost = 100;
  return absl::StrCat("\"", absl::CEscape(name.substr(0, kMost)),
                      name.size() > kMost ? "\"..." : "\"");
}

// --- The frame ---

constexpr absl::string_view kManifestMagic = "1passMan";
constexpr absl::string_view kIndexMagic = "1passIdx";
constexpr int64_t kBytesBefore = 8 + 4 + 8;
constexpr int64_t kBytesBehind = 8;
constexpr int64_t kFrameBytes = kBytesBefore + kBytesBehind;

void AppendLittleEndian(uint64_t value, int bytes, std::string& to) {
  for (int i = 0; i < bytes; ++i) {
    to.push_back(static_cast<char>(value >> (8 * i)));
  }
}

uint64_t LittleEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    value |= uint64_t{static_cast<uint8_t>(bytes[i])} << (8 * i);
  }
  return value;
}

uint64_t ChecksumOf(absl::string_view bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

template <typename Message>
absl::StatusOr<std::string> Encode(absl::string_view magic,
                                   const Message& message, int64_t most) {
  const size_t length = message.ByteSizeLong();
  if (length > static_cast<size_t>(most - kFrameBytes)) {
    return Broken("the file has ", length + kFrameBytes,
                  " bytes, expected at most ", most);
  }
  std::string bytes;
  bytes.reserve(length + kFrameBytes);
  absl::StrAppend(&bytes, magic);
  AppendLittleEndian(kManifestVersion, 4, bytes);
  AppendLittleEndian(length, 8, bytes);
  message.AppendPartialToString(&bytes);
  AppendLittleEndian(ChecksumOf(bytes), 8, bytes);
  return bytes;
}

// The message in the frame.
absl::StatusOr<absl::string_view> Unframe(absl::string_view bytes,
                                          absl::string_view magic,
                                          int64_t most) {
  const int64_t size = static_cast<int64_t>(bytes.size());
  if (size < kFrameBytes || size > most) {
    return Broken("the file has ", size, " bytes, expected ", kFrameBytes,
                  " to ", most);
  }
  if (bytes.substr(0, 8) != magic) {
    return Broken("begins with ", Quoted(bytes.substr(0, 8)), ", expected ",
                  Quoted(magic));
  }
  const uint64_t length = LittleEndian(bytes.substr(12, 8));
  if (length != static_cast<uint64_t>(size - kFrameBytes)) {
    return Broken("is said to hold ", length, " bytes, and holds ",
                  size - kFrameBytes);
  }
  const uint64_t checksum = ChecksumOf(bytes.substr(0, size - kBytesBehind));
  const uint64_t stored = LittleEndian(bytes.substr(size - kBytesBehind));
  if (checksum != stored) {
    return Broken("has the checksum ", absl::Hex(checksum, absl::kZeroPad16),
                  ", expected ", absl::Hex(stored, absl::kZeroPad16));
  }
  // Behind the checksum: a bit that flipped makes nothing newer.
  const uint64_t version = LittleEndian(bytes.substr(8, 4));
  if (version > kManifestVersion) {
    return Broken("has the version ", version,
                  ", which is newer than this program: it reads those up to ",
                  kManifestVersion);
  }
  if (version == 0) return Broken("has the version 0, expected 1 or more");
  return bytes.substr(kBytesBefore, length);
}

// --- The encoding: looked at before it is parsed. Of a hostile one each two
// bytes may become an empty message of a hundred, and groups recurse. ---

enum class Wire : uint8_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kFixed32 = 5
};

struct MessageRule;

struct FieldRule {
  const char* name;
  int number;
  Wire wire;
  bool repeated = false;
  // Where they are bytes, how many.
  int64_t least = 0;
  int64_t most = 0;
  // Where these are a message.
  const MessageRule* message = nullptr;
};

struct MessageRule {
  const char* name;
  absl::Span<const FieldRule> fields;
};

constexpr FieldRule Number(const char* name, int number) {
  return {name, number, Wire::kVarint};
}

constexpr FieldRule Numbers(const char* name, int number) {
  return {name, number, Wire::kBytes, false, 0, 10 * kMostDimensions};
}

constexpr FieldRule Fixed64(const char* name, int number) {
  return {name, number, Wire::kFixed64};
}

constexpr FieldRule Fixed32(const char* name, int number) {
  return {name, number, Wire::kFixed32};
}

constexpr FieldRule Text(const char* name, int number, int64_t most,
                         bool repeated = false) {
  return {name, number, Wire::kBytes, repeated, 1, most};
}

// `least`: a valid one has no fewer.
constexpr FieldRule Messages(const char* name, int number, int64_t least,
                             const MessageRule& message, bool repeated = true) {
  return {name,  number,          Wire::kBytes, repeated,
          least, kMostIndexBytes, &message};
}

constexpr FieldRule kChunkFields[] = {Number("offset", 1), Number("length", 2),
                                      Number("first", 3), Number("elements", 4),
                                      Fixed64("checksum", 5)};
constexpr MessageRule kChunk = {"chunk", kChunkFields};

constexpr FieldRule kTensorFields[] = {Text("name", 1, kMostTensorNameBytes),
                                       Number("element_type", 2),
                                       Number("state_type", 3),
                                       Number("form", 4),
                                       Numbers("shape", 5),
                                       Numbers("offset", 6),
                                       Numbers("extent", 7),
                                       Text("scales", 8, kMostTensorNameBytes),
                                       Number("step", 9),
                                       Number("file", 10),
                                       Messages("chunks", 11, 15, kChunk)};
constexpr MessageRule kTensor = {"tensor", kTensorFields};

constexpr FieldRule kDataFileFields[] = {
    Text("name", 1, kMostFileNameBytes), Number("length", 2),
    Number("header_length", 3), Fixed64("header_checksum", 4)};
constexpr MessageRule kDataFile = {"file", kDataFileFields};

constexpr FieldRule kIndexFields[] = {Number("rank", 1),
                                      Number("world", 2),
                                      Number("leaf", 3),
                                      Number("checksum_algorithm", 4),
                                      Messages("files", 5, 16, kDataFile),
                                      Messages("tensors", 6, 9, kTensor)};
constexpr MessageRule kIndex = {"index", kIndexFields};

constexpr FieldRule kGroupFields[] = {
    Fixed32("lr", 1),
    Fixed32("beta1", 2),
    Fixed32("beta2", 3),
    Fixed32("eps", 4),
    Fixed32("weight_decay", 5),
    Number("mode", 6),
    Number("bias_correction", 7),
    Number("step", 8),
    Text("parameters", 9, kMostTensorNameBytes, /*repeated=*/true)};
constexpr MessageRule kGroup = {"group", kGroupFields};

constexpr FieldRule kLossScaleFields[] = {Fixed64("scale", 1),
                                          Number("hysteresis_left", 2),
                                          Number("clean_steps", 3)};
constexpr MessageRule kLossScale = {"loss_scale", kLossScaleFields};

constexpr FieldRule kRankIndexFields[] = {
    Number("rank", 1), Text("file", 2, kMostFileNameBytes), Number("length", 3),
    Fixed64("checksum", 4)};
constexpr MessageRule kRankIndex = {"index", kRankIndexFields};

constexpr FieldRule kFileFields[] = {Text("name", 1, kMostFileNameBytes),
                                     Number("length", 2)};
constexpr MessageRule kFile = {"file", kFileFields};

constexpr FieldRule kManifestFields[] = {
    Number("step", 1),
    Number("world", 2),
    Number("leaf", 3),
    Number("layout", 4),
    Number("distribution", 5),
    Number("checksum_algorithm", 6),
    Messages("groups", 7, 27, kGroup),
    Messages("loss_scale", 8, 0, kLossScale, /*repeated=*/false),
    Text("user", 9, kMostManifestBytes),
    Messages("indexes", 10, 14, kRankIndex),
    Messages("files", 11, 3, kFile)};
constexpr MessageRule kManifest = {"manifest", kManifestFields};

// Takes the number at bytes[at, end). False: there is none.
bool TakeVarint(absl::string_view bytes, size_t end, size_t& at,
                uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 70 && at < end; shift += 7) {
    const uint8_t byte = static_cast<uint8_t>(bytes[at++]);
    value |= uint64_t{byte & 0x7fu} << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

// Whether it has the fields that the rules know and no others, each as often
// and as long as they say.
absl::Status CheckEncoding(absl::string_view bytes, const MessageRule& rule) {
  struct Level {
    const MessageRule* message;
    size_t end;
    uint32_t seen;  // a bit a field
  };
  // A chunk of a tensor of an index is the third.
  Level levels[3] = {{&rule, bytes.size(), 0}};
  Level* level = levels;
  size_t at = 0;
  while (true) {
    if (at == level->end) {
      if (level == levels) return absl::OkStatus();
      --level;
      continue;
    }
    const size_t start = at + kBytesBefore;  // in the file
    uint64_t tag;
    if (!TakeVarint(bytes, level->end, at, tag)) {
      return Broken("byte ", start, ": ", level->message->name,
                    " ends amid a field");
    }
    const auto field = std::find_if(
        level->message->fields.begin(), level->message->fields.end(),
        [tag](const FieldRule& field) {
          return tag == (static_cast<uint64_t>(field.number) << 3 |
                         static_cast<uint64_t>(field.wire));
        });
    if (field == level->message->fields.end()) {
      return Broken("byte ", start, ": ", level->message->name,
                    " has the unknown field ", tag >> 3, " of type ", tag & 7);
    }
    const auto broken = [&](absl::string_view problem) {
      return Broken("byte ", start, ": ", level->message->name, ".",
                    field->name, " ", problem);
    };
    const uint32_t bit = uint32_t{1} << field->number;
    if (!field->repeated && (level->seen & bit) != 0) {
      return broken("is there twice");
    }
    level->seen |= bit;
    uint64_t length = field->wire == Wire::kFixed64   ? 8
                      : field->wire == Wire::kFixed32 ? 4
                                                      : 0;
    uint64_t number;
    if (field->wire == Wire::kVarint || field->wire == Wire::kBytes) {
      if (!TakeVarint(bytes, level->end, at, number)) {
        return broken("does not end");
      }
      if (field->wire == Wire::kBytes) length = number;
    }
    if (length > level->end - at) return broken("does not end");
    if (field->wire == Wire::kBytes &&
        (length < static_cast<uint64_t>(field->least) ||
         length > static_cast<uint64_t>(field->most))) {
      return broken(absl::StrCat("has ", length, " bytes, expected ",
                                 field->least, " to ", field->most));
    }
    if (field->message != nullptr) {
      ++level;
      *level = {field->message, at + static_cast<size_t>(length), 0};
    } else {
      at += length;
    }
  }
}

template <typename Message>
absl::StatusOr<Message> Decode(absl::string_view bytes, absl::string_view magic,
                               const MessageRule& rule, int64_t most) {
  absl::string_view payload;
  ONEPASS_ASSIGN_OR_RETURN(payload, Unframe(bytes, magic, most));
  ONEPASS_RETURN_IF_ERROR(CheckEncoding(payload, rule));
  Message message;
  if (!message.ParseFromArray(payload.data(),
                              static_cast<int>(payload.size()))) {
    return Broken("does not hold a message of its kind");
  }
  return message;
}

// --- Rules of fields ---

absl::Status CheckRange(const char* field, int64_t value, int64_t least,
                        int64_t most = std::numeric_limits<int64_t>::max()) {
  if (value >= least && value <= most) return absl::OkStatus();
  return most == std::numeric_limits<int64_t>::max()
             ? Broken(field, " is ", value, ", expected at least ", least)
             : Broken(field, " is ", value, ", expected ", least, " to ", most);
}

absl::Status CheckEqual(const char* field, int64_t value, int64_t expected) {
  if (value == expected) return absl::OkStatus();
  return Broken(field, " is ", value, ", expected ", expected);
}

absl::Status CheckThere(const char* field, bool there) {
  return there ? absl::OkStatus() : Broken(field, " is missing");
}

bool IsUtf8(absl::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const uint8_t lead = static_cast<uint8_t>(text[i++]);
    if (lead < 0x80) continue;
    if (lead < 0xc2 || lead > 0xf4) return false;
    const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    uint32_t code = lead & (0x3fu >> more);
    for (int j = 0; j < more; ++j) {
      if (i == text.size() || (text[i] & 0xc0) != 0x80) return false;
      code = code << 6 | (text[i++] & 0x3f);
    }
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    if (code < kLeast[more] || code > 0x10ffff || surrogate) return false;
  }
  return true;
}

absl::Status CheckText(const char* field, absl::string_view text, int most) {
  if (text.empty()) return Broken(field, " is empty");
  if (text.size() > static_cast<size_t>(most)) {
    return Broken(field, " ", Quoted(text), " has ", text.size(),
                  " bytes, expected at most ", most);
  }
  if (text.find('\0') != text.npos) {
    return Broken(field, " ", Quoted(text), " has a NUL");
  }
  if (!IsUtf8(text)) return Broken(field, " ", Quoted(text), " is no UTF-8");
  return absl::OkStatus();
}

absl::Status CheckFileName(const char* field, absl::string_view name) {
  ONEPASS_RETURN_IF_ERROR(CheckText(field, name, kMostFileNameBytes));
  if (name.find('/') != name.npos || name == "." || name == "..") {
    return Broken(field, " ", Quoted(name),
                  " is not the name of a file in the checkpoint");
  }
  if (name == kManifestName) {
    return Broken(field, " is that of the manifest");
  }
  return absl::OkStatus();
}

// Sorts; `what` are they.
absl::Status CheckUnique(const char* what,
                         std::vector<absl::string_view>& names) {
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return absl::OkStatus();
  return Broken(what, " has ", Quoted(*twice), " twice");
}

// --- Rules of the manifest ---

// What an optimizer would refuse is found here, before its state is replaced.

absl::Status CheckNotNegative(const char* field, bool there, float value) {
  ONEPASS_RETURN_IF_ERROR(CheckThere(field, there));
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return Broken(field, " is ", value, ", expected a finite number from 0 on");
}

absl::Status CheckBeta(const char* field, bool there, float value) {
  ONEPASS_RETURN_IF_ERROR(CheckThere(field, there));
  if (value >= 0 && value < 1) return absl::OkStatus();
  return Broken(field, " is ", value, ", expected at least 0 and below 1");
}

absl::Status CheckGroup(const Group& group) {
  ONEPASS_RETURN_IF_ERROR(CheckNotNegative("lr", group.has_lr(), group.lr()));
  ONEPASS_RETURN_IF_ERROR(CheckBeta("beta1", group.has_beta1(), group.beta1()));
  ONEPASS_RETURN_IF_ERROR(CheckBeta("beta2", group.has_beta2(), group.beta2()));
  ONEPASS_RETURN_IF_ERROR(
      CheckNotNegative("eps", group.has_eps(), group.eps()));
  ONEPASS_RETURN_IF_ERROR(CheckNotNegative(
      "weight_decay", group.has_weight_decay(), group.weight_decay()));
  ONEPASS_RETURN_IF_ERROR(CheckRange("mode", group.mode(), 1, Group::Mode_MAX));
  ONEPASS_RETURN_IF_ERROR(CheckRange("step", group.step(), 0, kMostSteps));
  for (int i = 0; i < group.parameters_size(); ++i) {
    ONEPASS_RETURN_IF_ERROR(
        CheckText("parameters", group.parameters(i), kMostTensorNameBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckLossScale(const LossScale& loss_scale) {
  const double scale = loss_scale.scale();
  int exponent = 0;
  if (!(scale >= 0x1p-126 && scale <= 0x1p126) ||
      std::frexp(scale, &exponent) != 0.5) {
    return Broken("scale is ", scale,
                  ", expected a power of two from 2^-126 to 2^126");
  }
  ONEPASS_RETURN_IF_ERROR(
      CheckRange("hysteresis_left", loss_scale.hysteresis_left(), 1));
  return CheckRange("clean_steps", loss_scale.clean_steps(), 0);
}

// The number of a file in the list of the manifest, which is sorted.
std::optional<int> FindFile(const Manifest& manifest, absl::string_view name) {
  const auto& files = manifest.files();
  const auto found =
      std::lower_bound(files.begin(), files.end(), name,
                       [](const File& file, absl::string_view name) {
                         return absl::string_view(file.name()) < name;
                       });
  if (found == files.end() || found->name() != name) return std::nullopt;
  return static_cast<int>(found - files.begin());
}

// Of a file that has the field `field` elsewhere.
absl::Status CheckListed(const Manifest& manifest, const char* field,
                         absl::string_view name, int64_t length) {
  const std::optional<int> number = FindFile(manifest, name);
  if (!number.has_value()) {
    return Broken(field, " ", Quoted(name),
                  " is not in the manifest's list of files");
  }
  const int64_t listed = manifest.files(*number).length();
  if (length == listed) return absl::OkStatus();
  return Broken("length of ", Quoted(name), " is ", length,
                ", and in the manifest's list of files ", listed);
}

absl::Status CheckManifest(const Manifest& manifest) {
  ONEPASS_RETURN_IF_ERROR(CheckRange("step", manifest.step(), 0, kMostSteps));
  ONEPASS_RETURN_IF_ERROR(CheckRange("world", manifest.world(), 1, kMostRanks));
  ONEPASS_RETURN_IF_ERROR(CheckRange("leaf", manifest.leaf(), 1));
  ONEPASS_RETURN_IF_ERROR(
      CheckRange("layout", manifest.layout(), 1, checkpoint::Layout_MAX));
  ONEPASS_RETURN_IF_ERROR(CheckRange("distribution", manifest.distribution(), 1,
                                     checkpoint::Distribution_MAX));
  ONEPASS_RETURN_IF_ERROR(CheckRange("checksum_algorithm",
                                     manifest.checksum_algorithm(), 1,
                                     checkpoint::ChecksumAlgorithm_MAX));

  std::vector<absl::string_view> parameters;
  for (int i = 0; i < manifest.groups_size(); ++i) {
    const Group& group = manifest.groups(i);
    ONEPASS_RETURN_IF_ERROR(In("groups", i, CheckGroup(group)));
    parameters.insert(parameters.end(), group.parameters().begin(),
                      group.parameters().end());
  }
  ONEPASS_RETURN_IF_ERROR(CheckUnique("groups", parameters));
  if (manifest.has_loss_scale()) {
    ONEPASS_RETURN_IF_ERROR(
        In("loss_scale", CheckLossScale(manifest.loss_scale())));
  }

  int64_t total = 0;
  for (int i = 0; i < manifest.files_size(); ++i) {
    const File& file = manifest.files(i);
    ONEPASS_RETURN_IF_ERROR(In("files", i, CheckFileName("name", file.name())));
    ONEPASS_RETURN_IF_ERROR(
        In("files", i, CheckRange("length", file.length(), 0)));
    if (i > 0 && file.name() <= manifest.files(i - 1).name()) {
      return Broken("files[", i, "].name ", Quoted(file.name()),
                    " does not come after ",
                    Quoted(manifest.files(i - 1).name()));
    }
    if (__builtin_add_overflow(total, file.length(), &total)) {
      return Broken("files have more bytes than fit 63 bits");
    }
  }

  if (manifest.indexes_size() != manifest.world()) {
    return Broken("indexes are ", manifest.indexes_size(), ", expected ",
                  manifest.world(), ", one a rank");
  }
  std::vector<bool> is_index(manifest.files_size());
  for (int i = 0; i < manifest.indexes_size(); ++i) {
    const RankIndex& index = manifest.indexes(i);
    ONEPASS_RETURN_IF_ERROR(
        In("indexes", i, CheckEqual("rank", index.rank(), i)));
    ONEPASS_RETURN_IF_ERROR(
        In("indexes", i,
           CheckRange("length", index.length(), kFrameBytes, kMostIndexBytes)));
    ONEPASS_RETURN_IF_ERROR(
        In("indexes", i, CheckThere("checksum", index.has_checksum())));
    ONEPASS_RETURN_IF_ERROR(
        In("indexes", i,
           CheckListed(manifest, "file", index.file(), index.length())));
    const int file = *FindFile(manifest, index.file());
    if (is_index[file]) {
      return Broken("indexes[", i, "].file ", Quoted(index.file()),
                    " is that of another rank, too");
    }
    is_index[file] = true;
  }
  return absl::OkStatus();
}

// --- Rules of an index ---

constexpr struct {
  checkpoint::StateType state;
  checkpoint::Form form;
  checkpoint::ElementType element;
} kStored[] = {
    {checkpoint::STATE_FP32, checkpoint::FORM_EXACT, checkpoint::ELEMENT_F32},
    {checkpoint::STATE_FP32, checkpoint::FORM_UNSCALED,
     checkpoint::ELEMENT_F32},
    {checkpoint::STATE_FP16_SCALED, checkpoint::FORM_EXACT,
     checkpoint::ELEMENT_F16},
    {checkpoint::STATE_FP16_SCALED, checkpoint::FORM_UNSCALED,
     checkpoint::ELEMENT_F32},
    {checkpoint::STATE_FP16, checkpoint::FORM_EXACT, checkpoint::ELEMENT_F16},
    {checkpoint::STATE_FP16, checkpoint::FORM_UNSCALED,
     checkpoint::ELEMENT_F32},
    {checkpoint::STATE_BF16, checkpoint::FORM_EXACT, checkpoint::ELEMENT_BF16},
    {checkpoint::STATE_BF16, checkpoint::FORM_UNSCALED,
     checkpoint::ELEMENT_F32},
    {checkpoint::STATE_E4M3_SCALED, checkpoint::FORM_EXACT,
     checkpoint::ELEMENT_U8},
    {checkpoint::STATE_E4M3_SCALED, checkpoint::FORM_UNSCALED,
     checkpoint::ELEMENT_F32},
    {checkpoint::STATE_INT16_REMAINDER, checkpoint::FORM_EXACT,
     checkpoint::ELEMENT_I16},
    {checkpoint::STATE_INT16_REMAINDER, checkpoint::FORM_UNSCALED,
     checkpoint::ELEMENT_I16},
    {checkpoint::STATE_INT16_REMAINDER, checkpoint::FORM_UNSCALED,
     checkpoint::ELEMENT_F32},
    {checkpoint::STATE_SCALES, checkpoint::FORM_EXACT, checkpoint::ELEMENT_F32},
};

// As wide as any that state is converted to.
constexpr int64_t kMostElementBytes = 4;

// "STATE_FP32", or the number of what has no name.
template <typename Enum>
std::string NameOf(Enum value, const std::string& name) {
  return name.empty() ? absl::StrCat(static_cast<int>(value)) : name;
}

bool IsScaled(const Tensor& tensor) {
  return tensor.form() == checkpoint::FORM_EXACT &&
         (tensor.state_type() == checkpoint::STATE_FP16_SCALED ||
          tensor.state_type() == checkpoint::STATE_E4M3_SCALED);
}

// Of sizes that are checked.
template <typename Sizes>
int64_t Product(const Sizes& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

// Of a box that is checked, where it is a range of the tensor's elements.
struct Range {
  int64_t begin;
  int64_t end;
};

std::optional<Range> AsRange(const Tensor& tensor) {
  if (tensor.extent_size() == 1) {
    return Range{tensor.offset(0), tensor.offset(0) + tensor.extent(0)};
  }
  // All of it, or its one element.
  if (std::equal(tensor.extent().begin(), tensor.extent().end(),
                 tensor.shape().begin(), tensor.shape().end())) {
    return Range{0, Product(tensor.shape())};
  }
  return std::nullopt;
}

absl::Status CheckShapeAndBox(const Tensor& tensor) {
  const int dimensions = tensor.shape_size();
  ONEPASS_RETURN_IF_ERROR(
      CheckRange("dimensions", dimensions, 0, kMostDimensions));
  // Strides fit 63 bits, too, where a size is 0.
  int64_t bytes = kMostElementBytes;
  for (const int64_t size : tensor.shape()) {
    ONEPASS_RETURN_IF_ERROR(CheckRange("shape", size, 0));
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) {
      return Broken("shape has more elements than fit 61 bits");
    }
  }
  if (tensor.offset_size() != tensor.extent_size() ||
      (tensor.extent_size() != dimensions && tensor.extent_size() != 1)) {
    return Broken("offset and extent have ", tensor.offset_size(), " and ",
                  tensor.extent_size(), " dimensions, expected both ",
                  dimensions, ", as the shape, or one");
  }
  for (int i = 0; i < tensor.extent_size(); ++i) {
    const int64_t size = tensor.extent_size() == dimensions
                             ? tensor.shape(i)
                             : Product(tensor.shape());
    ONEPASS_RETURN_IF_ERROR(CheckRange("offset", tensor.offset(i), 0, size));
    ONEPASS_RETURN_IF_ERROR(
        CheckRange("extent", tensor.extent(i), 0, size - tensor.offset(i)));
  }
  return absl::OkStatus();
}

absl::Status CheckChunks(const Tensor& tensor) {
  const int64_t element_bytes = ElementBytes(tensor.element_type());
  const int64_t numel = Product(tensor.extent());
  int64_t first = 0;
  int64_t end = 0;
  for (int i = 0; i < tensor.chunks_size(); ++i) {
    const Chunk& chunk = tensor.chunks(i);
    const auto in = [i](const absl::Status& status) {
      return In("chunks", i, status);
    };
    ONEPASS_RETURN_IF_ERROR(in(CheckEqual("first", chunk.first(), first)));
    ONEPASS_RETURN_IF_ERROR(
        in(CheckRange("elements", chunk.elements(), 1, numel - first)));
    ONEPASS_RETURN_IF_ERROR(in(CheckEqual("length", chunk.length(),
                                          chunk.elements() * element_bytes)));
    ONEPASS_RETURN_IF_ERROR(in(CheckThere("checksum", chunk.has_checksum())));
    ONEPASS_RETURN_IF_ERROR(
        in(i == 0 ? CheckRange("offset", chunk.offset(), 0)
                  : CheckEqual("offset", chunk.offset(), end)));
    if (__builtin_add_overflow(chunk.offset(), chunk.length(), &end)) {
      return in(Broken("offset is ", chunk.offset(),
                       ": its end does not fit 63 bits"));
    }
    first += chunk.elements();
  }
  if (first == numel) return absl::OkStatus();
  return Broken("chunks have ", first, " elements, and the box ", numel);
}

absl::Status CheckTensor(const Tensor& tensor) {
  ONEPASS_RETURN_IF_ERROR(
      CheckText("name", tensor.name(), kMostTensorNameBytes));
  if (std::none_of(std::begin(kStored), std::end(kStored),
                   [&](const auto& stored) {
                     return stored.state == tensor.state_type() &&
                            stored.form == tensor.form() &&
                            stored.element == tensor.element_type();
                   })) {
    return Broken(
        "state_type ",
        NameOf(tensor.state_type(), StateType_Name(tensor.state_type())),
        " in the form ", NameOf(tensor.form(), Form_Name(tensor.form())),
        " is not stored as ",
        NameOf(tensor.element_type(), ElementType_Name(tensor.element_type())));
  }
  ONEPASS_RETURN_IF_ERROR(CheckShapeAndBox(tensor));
  ONEPASS_RETURN_IF_ERROR(CheckRange("step", tensor.step(), 0));
  if (IsScaled(tensor) != !tensor.scales().empty()) {
    return Broken("scales is ", Quoted(tensor.scales()), ", expected ",
                  IsScaled(tensor) ? "the name of a tensor" : "none");
  }
  return CheckChunks(tensor);
}

// The scales of `tensor` against it. Both are checked by themselves.
absl::Status CheckScales(const Tensor& tensor, const Tensor& scales,
                         int64_t leaf) {
  if (scales.state_type() != checkpoint::STATE_SCALES) {
    return Broken("are of the type ", StateType_Name(scales.state_type()));
  }
  if (scales.step() != tensor.step()) {
    return Broken("are of step ", scales.step(), ", and it is of step ",
                  tensor.step());
  }
  const int64_t numel = Product(tensor.shape());
  const std::optional<Range> range = AsRange(tensor);
  const bool empty = Product(tensor.extent()) == 0;
  if (!empty && (!range.has_value() || range->begin % leaf != 0 ||
                 (range->end % leaf != 0 && range->end != numel))) {
    return Broken("are not there for its box, which is no range of leaves of ",
                  leaf);
  }
  const auto leaves = [leaf](int64_t elements) {
    return elements / leaf + (elements % leaf != 0);
  };
  if (scales.shape_size() != 1 || scales.shape(0) != leaves(numel)) {
    return Broken("have the shape [", absl::StrJoin(scales.shape(), ", "),
                  "], expected [", leaves(numel), "], one a leaf");
  }
  const int64_t begin = empty ? scales.offset(0) : leaves(range->begin);
  const int64_t extent = empty ? 0 : leaves(range->end) - begin;
  if (scales.offset(0) != begin || scales.extent(0) != extent) {
    return Broken("are ", scales.extent(0), " from ", scales.offset(0),
                  " on, expected ", extent, " from ", begin, " on");
  }
  return absl::OkStatus();
}

// All tensors' scales, and all scales' tensors.
absl::Status CheckAllScales(const Index& index) {
  const auto name = [&index](int i) -> absl::string_view {
    return index.tensors(i).name();
  };
  std::vector<int> by_name(index.tensors_size());
  for (int i = 0; i < index.tensors_size(); ++i) by_name[i] = i;
  std::sort(by_name.begin(), by_name.end(),
            [&](int a, int b) { return name(a) < name(b); });
  const auto twice =
      std::adjacent_find(by_name.begin(), by_name.end(),
                         [&](int a, int b) { return name(a) == name(b); });
  if (twice != by_name.end()) {
    return Broken("tensors has ", Quoted(name(*twice)), " twice");
  }

  std::vector<bool> named(index.tensors_size());
  for (int i = 0; i < index.tensors_size(); ++i) {
    const Tensor& tensor = index.tensors(i);
    if (!IsScaled(tensor)) continue;
    const auto found = std::lower_bound(
        by_name.begin(), by_name.end(), absl::string_view(tensor.scales()),
        [&](int a, absl::string_view b) { return name(a) < b; });
    const auto broken = [&](absl::string_view problem) {
      return In("tensors", i,
                Broken("scales ", Quoted(tensor.scales()), " of ",
                       Quoted(tensor.name()), " ", problem));
    };
    if (found == by_name.end() || name(*found) != tensor.scales()) {
      return broken("are not there");
    }
    if (named[*found]) return broken("are those of another tensor, too");
    named[*found] = true;
    const absl::Status status =
        CheckScales(tensor, index.tensors(*found), index.leaf());
    if (!status.ok()) return broken(status.message());
  }
  for (int i = 0; i < index.tensors_size(); ++i) {
    if (index.tensors(i).state_type() == checkpoint::STATE_SCALES &&
        !named[i]) {
      return Broken("tensors[", i, "] ", Quoted(name(i)),
                    " are scales that no tensor names");
    }
  }
  return absl::OkStatus();
}

// Whether the data of tensors fill each file, one after the other.
absl::Status CheckData(const Index& index) {
  struct Run {
    int file;
    int64_t begin;
    int64_t end;
    int tensor;
  };
  std::vector<Run> runs;
  for (int i = 0; i < index.tensors_size(); ++i) {
    const Tensor& tensor = index.tensors(i);
    ONEPASS_RETURN_IF_ERROR(
        In("tensors", i,
           CheckRange("file", tensor.file(), 0, index.files_size() - 1)));
    if (tensor.chunks().empty()) continue;
    const Chunk& last = *tensor.chunks().rbegin();
    runs.push_back({tensor.file(), tensor.chunks(0).offset(),
                    last.offset() + last.length(), i});
  }
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return std::tie(a.file, a.begin, a.tensor) <
           std::tie(b.file, b.begin, b.tensor);
  });
  auto run = runs.begin();
  for (int i = 0; i < index.files_size(); ++i) {
    const DataFile& file = index.files(i);
    int64_t end = file.header_length();
    for (; run != runs.end() && run->file == i; ++run) {
      if (run->begin != end) {
        return Broken("tensors[", run->tensor, "] ",
                      Quoted(index.tensors(run->tensor).name()),
                      " begins at byte ", run->begin, " of ",
                      Quoted(file.name()), ", where what is before it ends at ",
                      end);
      }
      end = run->end;
    }
    if (end != file.length()) {
      return Broken("files[", i, "] ", Quoted(file.name()), " has ",
                    file.length(), " bytes, and its tensors end at ", end);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckIndex(const Index& index) {
  ONEPASS_RETURN_IF_ERROR(CheckRange("world", index.world(), 1, kMostRanks));
  ONEPASS_RETURN_IF_ERROR(
      CheckRange("rank", index.rank(), 0, index.world() - 1));
  ONEPASS_RETURN_IF_ERROR(CheckRange("leaf", index.leaf(), 1));
  ONEPASS_RETURN_IF_ERROR(CheckRange("checksum_algorithm",
                                     index.checksum_algorithm(), 1,
                                     checkpoint::ChecksumAlgorithm_MAX));
  std::vector<absl::string_view> names;
  for (int i = 0; i < index.files_size(); ++i) {
    const DataFile& file = index.files(i);
    const auto in = [i](const absl::Status& status) {
      return In("files", i, status);
    };
    ONEPASS_RETURN_IF_ERROR(in(CheckFileName("name", file.name())));
    ONEPASS_RETURN_IF_ERROR(in(CheckRange("length", file.length(), 0)));
    ONEPASS_RETURN_IF_ERROR(in(CheckRange(
        "header_length", file.header_length(), kSafetensorsLengthBytes + 1,
        std::min(file.length(),
                 kSafetensorsLengthBytes + kMostSafetensorsHeaderBytes))));
    ONEPASS_RETURN_IF_ERROR(
        in(CheckThere("header_checksum", file.has_header_checksum())));
    names.push_back(file.name());
  }
  ONEPASS_RETURN_IF_ERROR(CheckUnique("files", names));
  for (int i = 0; i < index.tensors_size(); ++i) {
    ONEPASS_RETURN_IF_ERROR(In("tensors", i, CheckTensor(index.tensors(i))));
  }
  ONEPASS_RETURN_IF_ERROR(CheckAllScales(index));
  return CheckData(index);
}

// What is said in both.
absl::Status CheckAgainstManifest(const Index& index, const Manifest& manifest,
                                  int rank) {
  ONEPASS_RETURN_IF_ERROR(CheckEqual("rank", index.rank(), rank));
  ONEPASS_RETURN_IF_ERROR(
      CheckRange("world", index.world(), manifest.world(), manifest.world()));
  ONEPASS_RETURN_IF_ERROR(
      CheckRange("leaf", index.leaf(), manifest.leaf(), manifest.leaf()));
  ONEPASS_RETURN_IF_ERROR(
      CheckRange("checksum_algorithm", index.checksum_algorithm(),
                 manifest.checksum_algorithm(), manifest.checksum_algorithm()));
  for (int i = 0; i < index.files_size(); ++i) {
    const DataFile& file = index.files(i);
    ONEPASS_RETURN_IF_ERROR(In(
        "files", i, CheckListed(manifest, "name", file.name(), file.length())));
  }
  return absl::OkStatus();
}

// --- Rules of all indexes ---

// What a rank has of a tensor.
struct Part {
  const Tensor* tensor;
  int rank;
};

// Whether `a` and `b`, of different ranks, speak of the same tensor.
absl::Status CheckAgree(const Part& a, const Part& b) {
  const auto check = [&](const char* field, bool equal) {
    return equal ? absl::OkStatus()
                 : Broken(field, " is not the same on ranks ", a.rank, " and ",
                          b.rank);
  };
  const Tensor& x = *a.tensor;
  const Tensor& y = *b.tensor;
  ONEPASS_RETURN_IF_ERROR(
      check("shape", std::equal(x.shape().begin(), x.shape().end(),
                                y.shape().begin(), y.shape().end())));
  ONEPASS_RETURN_IF_ERROR(
      check("state_type", x.state_type() == y.state_type()));
  ONEPASS_RETURN_IF_ERROR(check("form", x.form() == y.form()));
  ONEPASS_RETURN_IF_ERROR(
      check("element_type", x.element_type() == y.element_type()));
  ONEPASS_RETURN_IF_ERROR(check("scales", x.scales() == y.scales()));
  return check("step", x.step() == y.step());
}

// Whether ranges that are not empty have all elements, each once.
absl::Status CheckRanges(const std::vector<Part>& parts, int64_t numel) {
  std::vector<std::pair<Range, int>> ranges;
  for (const Part& part : parts) {
    ranges.emplace_back(*AsRange(*part.tensor), part.rank);
  }
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
    return std::tie(a.first.begin, a.second) <
           std::tie(b.first.begin, b.second);
  });
  int64_t end = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto& [range, rank] = ranges[i];
    if (range.begin < end) {
      return Broken("ranks ", ranges[i - 1].second, " and ", rank,
                    " both have element ", range.begin);
    }
    if (range.begin > end) break;
    end = range.end;
  }
  if (end == numel) return absl::OkStatus();
  return Broken("no rank has element ", end, " of ", numel);
}

bool Overlap(const Tensor& a, const Tensor& b) {
  for (int d = 0; d < a.extent_size(); ++d) {
    if (a.offset(d) + a.extent(d) <= b.offset(d) ||
        b.offset(d) + b.extent(d) <= a.offset(d)) {
      return false;
    }
  }
  return true;
}

// The dimension in which the boxes have the most different offsets.
int SweepDimension(const std::vector<Part>& parts) {
  int best = 0;
  size_t most = 0;
  std::vector<int64_t> offsets(parts.size());
  for (int d = 0; d < parts[0].tensor->extent_size(); ++d) {
    for (size_t i = 0; i < parts.size(); ++i) {
      offsets[i] = parts[i].tensor->offset(d);
    }
    std::sort(offsets.begin(), offsets.end());
    const size_t different =
        std::unique(offsets.begin(), offsets.end()) - offsets.begin();
    if (different > most) {
      most = different;
      best = d;
    }
  }
  return best;
}

// The same for boxes, of as many dimensions as the tensor. `comparisons` are
// those that may still be made, for all tensors.
absl::Status CheckDisjoint(std::vector<Part>& parts, int64_t numel,
                           int64_t& comparisons) {
  // Only those are compared that overlap in one dimension, for which they are
  // sorted.
  const int d = SweepDimension(parts);
  std::sort(parts.begin(), parts.end(), [d](const Part& a, const Part& b) {
    return std::make_tuple(a.tensor->offset(d), a.rank) <
           std::make_tuple(b.tensor->offset(d), b.rank);
  });
  int64_t elements = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& a = *parts[i].tensor;
    for (size_t j = i + 1; j < parts.size(); ++j) {
      const Tensor& b = *parts[j].tensor;
      if (b.offset(d) >= a.offset(d) + a.extent(d)) break;
      comparisons -= a.extent_size();
      if (comparisons < 0) {
        return Broken("the boxes are too many to compare");
      }
      if (Overlap(a, b)) {
        return Broken("the boxes of ranks ",
                      std::min(parts[i].rank, parts[j].rank), " and ",
                      std::max(parts[i].rank, parts[j].rank), " overlap");
      }
    }
    elements += Product(a.extent());
  }
  if (elements == numel) return absl::OkStatus();
  return Broken("all ranks together have ", elements, " elements of ", numel);
}

absl::Status CheckParts(std::vector<Part>& parts, int64_t& comparisons) {
  for (const Part& part : parts) {
    ONEPASS_RETURN_IF_ERROR(CheckAgree(parts[0], part));
  }
  const int64_t numel = Product(parts[0].tensor->shape());
  const int dimensions = parts[0].tensor->shape_size();
  parts.erase(std::remove_if(parts.begin(), parts.end(),
                             [](const Part& part) {
                               return Product(part.tensor->extent()) == 0;
                             }),
              parts.end());
  const auto is_range = [](const Part& part) {
    return AsRange(*part.tensor).has_value();
  };
  if (std::all_of(parts.begin(), parts.end(), is_range)) {
    return CheckRanges(parts, numel);
  }
  for (const Part& part : parts) {
    if (part.tensor->extent_size() != dimensions) {
      return Broken("rank ", part.rank,
                    " has a range of its elements, and others have boxes");
    }
  }
  return CheckDisjoint(parts, numel, comparisons);
}

}  // namespace

int64_t ElementBytes(checkpoint::ElementType type) {
  switch (type) {
    case checkpoint::ELEMENT_F32:
      return 4;
    case checkpoint::ELEMENT_F16:
    case checkpoint::ELEMENT_BF16:
    case checkpoint::ELEMENT_I16:
      return 2;
    case checkpoint::ELEMENT_U8:
      return 1;
    default:
      return 0;
  }
}

absl::StatusOr<std::string> EncodeManifest(const Manifest& manifest) {
  ONEPASS_RETURN_IF_ERROR(In("manifest", CheckManifest(manifest)));
  return Encode(kManifestMagic, manifest, kMostManifestBytes);
}

absl::StatusOr<std::string> EncodeIndex(const Index& index) {
  ONEPASS_RETURN_IF_ERROR(In("index", CheckIndex(index)));
  return Encode(kIndexMagic, index, kMostIndexBytes);
}

absl::StatusOr<Manifest> DecodeManifest(absl::string_view bytes,
                                        absl::string_view file) {
  absl::StatusOr<Manifest> manifest =
      Decode<Manifest>(bytes, kManifestMagic, kManifest, kMostManifestBytes);
  if (!manifest.ok()) return Damaged(file, manifest.status());
  ONEPASS_RETURN_IF_ERROR(Damaged(file, CheckManifest(*manifest)));
  return manifest;
}

absl::StatusOr<Index> DecodeIndex(absl::string_view bytes,
                                  const Manifest& manifest, int rank,
                                  absl::string_view file) {
  if (rank < 0 || rank >= manifest.indexes_size()) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": rank is ", rank,
                                                   ", and the manifest has ",
                                                   manifest.indexes_size()));
  }
  const RankIndex& entry = manifest.indexes(rank);
  if (bytes.size() != static_cast<size_t>(entry.length())) {
    return Damaged(
        file, absl::StrCat("the file has ", bytes.size(),
                           " bytes, and by the manifest ", entry.length()));
  }
  if (ChecksumOf(bytes) != entry.checksum()) {
    return Damaged(file,
                   absl::StrCat("has the checksum ",
                                absl::Hex(ChecksumOf(bytes), absl::kZeroPad16),
                                ", and by the manifest ",
                                absl::Hex(entry.checksum(), absl::kZeroPad16)));
  }
  absl::StatusOr<Index> index =
      Decode<Index>(bytes, kIndexMagic, kIndex, kMostIndexBytes);
  if (!index.ok()) return Damaged(file, index.status());
  ONEPASS_RETURN_IF_ERROR(Damaged(file, CheckIndex(*index)));
  ONEPASS_RETURN_IF_ERROR(
      Damaged(file, CheckAgainstManifest(*index, manifest, rank)));
  return index;
}

absl::Status CheckFiles(const Manifest& manifest,
                        absl::Span<const Index> indexes,
                        absl::string_view checkpoint) {
  std::vector<absl::string_view> names;
  for (const RankIndex& index : manifest.indexes()) {
    names.push_back(index.file());
  }
  for (const Index& index : indexes) {
    for (const DataFile& file : index.files()) names.push_back(file.name());
  }
  ONEPASS_RETURN_IF_ERROR(
      Damaged(checkpoint, CheckUnique("all indexes together", names)));
  // Each is in the list, which is sorted, too.
  for (int i = 0; i < manifest.files_size(); ++i) {
    if (static_cast<size_t>(i) == names.size() ||
        manifest.files(i).name() != names[i]) {
      return Damaged(
          checkpoint,
          absl::StrCat("files[", i, "] ", Quoted(manifest.files(i).name()),
                       " of the manifest is in no index"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckBoxes(absl::Span<const Index> indexes,
                        absl::string_view checkpoint,
                        int64_t most_comparisons) {
  std::vector<Part> all;
  for (const Index& index : indexes) {
    for (const Tensor& tensor : index.tensors()) {
      all.push_back({&tensor, index.rank()});
    }
  }
  std::sort(all.begin(), all.end(), [](const Part& a, const Part& b) {
    return std::tie(a.tensor->name(), a.rank) <
           std::tie(b.tensor->name(), b.rank);
  });
  int64_t comparisons = most_comparisons;
  std::vector<Part> parts;
  for (size_t begin = 0; begin < all.size();) {
    const std::string& name = all[begin].tensor->name();
    size_t end = begin;
    while (end < all.size() && all[end].tensor->name() == name) ++end;
    parts.assign(all.begin() + begin, all.begin() + end);
    const absl::Status status = CheckParts(parts, comparisons);
    if (!status.ok()) {
      return Damaged(checkpoint, absl::StrCat("tensor ", Quoted(name), ": ",
                                              status.message()));
    }
    begin = end;
  }
  return absl::OkStatus();
}

}  // namespace onepass
