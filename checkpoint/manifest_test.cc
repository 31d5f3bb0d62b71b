#include "checkpoint/manifest.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"
#include "xxhash.h"

namespace onepass {
namespace {

using checkpoint::Chunk;
using checkpoint::DataFile;
using checkpoint::Group;
using checkpoint::Index;
using checkpoint::Manifest;
using checkpoint::RankIndex;
using checkpoint::Tensor;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

// --- A small checkpoint of two ranks, with leaves of 4 ---

std::string LittleEndian(uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text.push_back(char(value >> (8 * i)));
  return text;
}

// What Encode*() does, of a message that breaks rules.
std::string Frame(absl::string_view magic, const std::string& message,
                  uint32_t version = kManifestVersion) {
  std::string bytes = absl::StrCat(magic, LittleEndian(version, 4),
                                   LittleEndian(message.size(), 8), message);
  return bytes + LittleEndian(XXH3_64bits(bytes.data(), bytes.size()), 8);
}

std::string FrameManifest(const Manifest& manifest) {
  return Frame("1passMan", manifest.SerializeAsString());
}

std::string FrameIndex(const Index& index) {
  return Frame("1passIdx", index.SerializeAsString());
}

// One after the other in the file, in chunks of at most 3 elements.
Tensor& AddTensor(const std::string& name, checkpoint::StateType state,
                  checkpoint::ElementType element,
                  const std::vector<int64_t>& shape,
                  const std::vector<int64_t>& offset,
                  const std::vector<int64_t>& extent, Index& index) {
  DataFile& file = *index.mutable_files(0);
  Tensor& tensor = *index.add_tensors();
  tensor.set_name(name);
  tensor.set_state_type(state);
  tensor.set_element_type(element);
  tensor.set_form(checkpoint::FORM_EXACT);
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  tensor.mutable_offset()->Add(offset.begin(), offset.end());
  tensor.mutable_extent()->Add(extent.begin(), extent.end());
  tensor.set_step(7);
  int64_t numel = 1;
  for (const int64_t size : extent) numel *= size;
  for (int64_t first = 0; first < numel; first += 3) {
    Chunk& chunk = *tensor.add_chunks();
    chunk.set_first(first);
    chunk.set_elements(std::min<int64_t>(3, numel - first));
    chunk.set_offset(file.length());
    chunk.set_length(chunk.elements() * ElementBytes(element));
    chunk.set_checksum(0x0123456789abcdef + first);
    file.set_length(file.length() + chunk.length());
  }
  return tensor;
}

Index MakeEmptyIndex(int rank) {
  Index index;
  index.set_rank(rank);
  index.set_world(2);
  index.set_leaf(4);
  index.set_checksum_algorithm(checkpoint::CHECKSUM_XXH3_64);
  DataFile& file = *index.add_files();
  file.set_name(absl::StrCat("rank-", rank, ".safetensors"));
  file.set_length(64);
  file.set_header_length(64);
  file.set_header_checksum(17);
  return index;
}

// Of the tensors, rank 0 has the first leaf and rank 1 the others.
Index MakeIndex(int rank) {
  Index index = MakeEmptyIndex(rank);
  const std::vector<int64_t> offset = {rank == 0 ? 0 : 4};
  const std::vector<int64_t> extent = {rank == 0 ? 4 : 6};
  const std::vector<int64_t> leaves = {rank == 0 ? 1 : 2};
  AddTensor("master", checkpoint::STATE_FP32, checkpoint::ELEMENT_F32, {2, 5},
            offset, extent, index);
  AddTensor("fp16", checkpoint::STATE_FP16_SCALED, checkpoint::ELEMENT_F16,
            {2, 5}, offset, extent, index)
      .set_scales("fp16.scales");
  AddTensor("fp16.scales", checkpoint::STATE_SCALES, checkpoint::ELEMENT_F32,
            {3}, {rank}, leaves, index);
  AddTensor("bf16", checkpoint::STATE_BF16, checkpoint::ELEMENT_BF16, {3, 4},
            {0, rank}, {3, rank == 0 ? 1 : 3}, index);
  AddTensor("\xc3\xa4", checkpoint::STATE_INT16_REMAINDER,
            checkpoint::ELEMENT_I16, {10}, offset, extent, index);
  AddTensor("empty", checkpoint::STATE_FP32, checkpoint::ELEMENT_F32, {0, 5},
            {0, 0}, {0, 5}, index);
  if (rank == 1) {
    AddTensor("scalar", checkpoint::STATE_FP32, checkpoint::ELEMENT_F32, {}, {},
              {}, index);
    AddTensor("e4m3", checkpoint::STATE_E4M3_SCALED, checkpoint::ELEMENT_U8,
              {2, 3}, {0, 0}, {2, 3}, index)
        .set_scales("e4m3.scales");
    AddTensor("e4m3.scales", checkpoint::STATE_SCALES, checkpoint::ELEMENT_F32,
              {2}, {0}, {2}, index);
  }
  return index;
}

// What the manifest says of an index.
void SetIndex(const Index& index, Manifest& manifest) {
  const std::string bytes = FrameIndex(index);
  RankIndex& entry = *manifest.mutable_indexes(index.rank());
  entry.set_length(bytes.size());
  entry.set_checksum(XXH3_64bits(bytes.data(), bytes.size()));
  manifest.mutable_files(index.rank())->set_length(bytes.size());
}

Group MakeGroup() {
  Group group;
  group.set_lr(1e-3f);
  group.set_beta1(0);
  group.set_beta2(0.999f);
  group.set_eps(1e-8f);
  group.set_weight_decay(0);
  group.set_mode(Group::MODE_ADAMW);
  group.set_bias_correction(true);
  group.set_step(7);
  return group;
}

Manifest MakeManifest() {
  Manifest manifest;
  manifest.set_step(7);
  manifest.set_world(2);
  manifest.set_leaf(4);
  manifest.set_layout(checkpoint::LAYOUT_NESTED);
  manifest.set_distribution(checkpoint::DISTRIBUTION_SHARDED);
  manifest.set_checksum_algorithm(checkpoint::CHECKSUM_XXH3_64);
  *manifest.add_groups() = MakeGroup();
  manifest.mutable_groups(0)->add_parameters("b");
  manifest.mutable_groups(0)->add_parameters("a");
  *manifest.add_groups() = MakeGroup();
  manifest.mutable_groups(1)->add_parameters("c");
  manifest.mutable_groups(1)->set_mode(Group::MODE_L2);
  manifest.mutable_loss_scale()->set_scale(1024);
  manifest.mutable_loss_scale()->set_hysteresis_left(1);
  manifest.mutable_loss_scale()->set_clean_steps(6);
  manifest.set_user(std::string("\0\xff data position", 16));
  for (const char* kind : {".index", ".safetensors"}) {
    for (int rank = 0; rank < 2; ++rank) {
      manifest.add_files()->set_name(absl::StrCat("rank-", rank, kind));
    }
  }
  std::swap(*manifest.mutable_files(1), *manifest.mutable_files(2));
  for (int rank = 0; rank < 2; ++rank) {
    manifest.add_indexes()->set_rank(rank);
    manifest.mutable_indexes(rank)->set_file(
        absl::StrCat("rank-", rank, ".index"));
  }
  return manifest;
}

// The manifest of these.
Manifest MakeManifest(const std::vector<Index>& indexes) {
  Manifest manifest = MakeManifest();
  for (const Index& index : indexes) {
    const std::string bytes = FrameIndex(index);
    RankIndex& entry = *manifest.mutable_indexes(index.rank());
    entry.set_length(bytes.size());
    entry.set_checksum(XXH3_64bits(bytes.data(), bytes.size()));
    manifest.mutable_files(2 * index.rank())->set_length(bytes.size());
    manifest.mutable_files(2 * index.rank() + 1)
        ->set_length(index.files(0).length());
  }
  return manifest;
}

std::vector<Index> MakeIndexes() { return {MakeIndex(0), MakeIndex(1)}; }

void ExpectError(const absl::Status& status, absl::StatusCode code,
                 absl::string_view problem) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), problem))
      << status << "\nexpected: " << problem;
}

// --- Round trips ---

TEST(ManifestTest, WhatIsWrittenIsRead) {
  const std::vector<Index> indexes = MakeIndexes();
  const Manifest manifest = MakeManifest(indexes);
  const absl::StatusOr<std::string> bytes = EncodeManifest(manifest);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(*bytes, FrameManifest(manifest));
  const absl::StatusOr<Manifest> read = DecodeManifest(*bytes, "manifest");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), manifest.SerializeAsString());

  for (const Index& index : indexes) {
    const absl::StatusOr<std::string> bytes = EncodeIndex(index);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(*bytes, FrameIndex(index));
    const absl::StatusOr<Index> read =
        DecodeIndex(*bytes, manifest, index.rank(), "index");
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->SerializeAsString(), index.SerializeAsString());
  }
  EXPECT_TRUE(CheckFiles(manifest, indexes, "dir").ok());
  const absl::Status boxes = CheckBoxes(indexes, "dir");
  EXPECT_TRUE(boxes.ok()) << boxes;
}

TEST(ManifestTest, LeastOfEach) {
  Manifest manifest = MakeManifest(MakeIndexes());
  manifest.set_step(0);
  manifest.set_world(1);
  manifest.clear_groups();
  manifest.clear_loss_scale();
  manifest.clear_user();
  manifest.mutable_indexes()->RemoveLast();
  manifest.mutable_files()->DeleteSubrange(1, 3);
  Index index = MakeEmptyIndex(0);
  index.set_world(1);
  index.clear_files();
  const absl::StatusOr<std::string> bytes = EncodeIndex(index);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  SetIndex(index, manifest);
  EXPECT_TRUE(EncodeManifest(manifest).ok())
      << EncodeManifest(manifest).status();
  EXPECT_TRUE(DecodeIndex(*bytes, manifest, 0, "index").ok());
  EXPECT_TRUE(CheckFiles(manifest, {index}, "dir").ok());
  EXPECT_TRUE(CheckBoxes({index}, "dir").ok());
}

// --- Damage ---

// Each bit that flips, each end that is cut off, something more.
template <typename Decode>
void ExpectDamageIsFound(const std::string& bytes, const Decode& decode) {
  ASSERT_TRUE(decode(bytes).ok());
  for (size_t i = 0; i < 8 * bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i / 8] ^= char(1 << i % 8);
    EXPECT_EQ(decode(damaged).code(), absl::StatusCode::kDataLoss) << i;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(decode(bytes.substr(0, i)).code(), absl::StatusCode::kDataLoss)
        << i;
  }
  EXPECT_EQ(decode(bytes + '\0').code(), absl::StatusCode::kDataLoss);
}

TEST(DamageTest, OfTheManifestIsFound) {
  ExpectDamageIsFound(FrameManifest(MakeManifest(MakeIndexes())),
                      [](const std::string& bytes) {
                        return DecodeManifest(bytes, "manifest").status();
                      });
}

TEST(DamageTest, OfAnIndexIsFound) {
  const Manifest manifest = MakeManifest(MakeIndexes());
  ExpectDamageIsFound(FrameIndex(MakeIndex(0)), [&](const std::string& bytes) {
    return DecodeIndex(bytes, manifest, 0, "index").status();
  });
  // By its own checksum, too.
  ExpectDamageIsFound(FrameIndex(MakeIndex(0)), [&](const std::string& bytes) {
    Manifest fitting = manifest;
    RankIndex& entry = *fitting.mutable_indexes(0);
    entry.set_length(bytes.size());
    entry.set_checksum(XXH3_64bits(bytes.data(), bytes.size()));
    return DecodeIndex(bytes, fitting, 0, "index").status();
  });
}

TEST(DamageTest, OfTheFrameIsNamed) {
  const std::string message = MakeManifest(MakeIndexes()).SerializeAsString();
  const std::string good = Frame("1passMan", message);
  std::string flipped = good;
  flipped[30] ^= 1;
  const struct {
    std::string bytes;
    std::string problem;
  } cases[] = {
      {"", "m: the file has 0 bytes, expected 28 to 67108864"},
      {good.substr(0, 27), "the file has 27 bytes"},
      {std::string(kMostManifestBytes + 1, 'x'),
       "the file has 67108865 bytes, expected 28 to 67108864"},
      {Frame("1passIdx", message),
       "begins with \"1passIdx\", expected \"1passMan\""},
      {good.substr(0, good.size() - 1),
       absl::StrCat("is said to hold ", message.size(), " bytes, and holds ",
                    message.size() - 1)},
      {flipped, "has the checksum "},
      {Frame("1passMan", message, 2),
       "m: has the version 2, which is newer than this program: it reads those "
       "up to 1"},
      {Frame("1passMan", message, 0), "has the version 0"},
  };
  for (const auto& c : cases) {
    ExpectError(DecodeManifest(c.bytes, "m").status(),
                absl::StatusCode::kDataLoss, c.problem);
  }
}

// --- The encoding ---

std::string Field(int number, int wire, const std::string& payload) {
  return char(number << 3 | wire) + payload;
}

std::string Bytes(int number, const std::string& payload) {
  std::string length;
  size_t rest = payload.size();
  for (; rest >= 128; rest /= 128) length.push_back(char(rest % 128 + 128));
  length.push_back(char(rest));
  return Field(number, 2, length + payload);
}

// What a hostile file may hold beneath a checksum that is right.
TEST(EncodingTest, IsCheckedBeforeItIsParsed) {
  const std::string least_file = Bytes(1, "f") + Field(2, 0, "\x63") +
                                 Field(3, 0, "\x40") + Field(4, 1, "checksum");
  const struct {
    std::string message;
    std::string problem;
  } cases[] = {
      {Field(7, 0, "\x01"), "byte 20: index has the unknown field 7 of type"},
      {Field(1, 2, "\x01x"), "has the unknown field 1 of type 2"},
      {Field(1, 3, "") + Field(1, 4, ""), "has the unknown field 1 of type 3"},
      {std::string("\0\1", 2), "has the unknown field 0 of type 0"},
      {std::string(11, '\xff'), "index ends amid a field"},
      {"\x80", "index ends amid a field"},
      {std::string(10, '\x80') + '\1', "index ends amid a field"},
      {Field(1, 0, "\x80"), "index.rank does not end"},
      {Field(1, 0, "\1") + Field(1, 0, "\1"), "index.rank is there twice"},
      {Field(5, 2, "\x7f"), "index.files does not end"},
      {Field(5, 2, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
       "index.files does not end"},
      {Bytes(5, ""), "byte 20: index.files has 0 bytes, expected 16 to"},
      {Bytes(5, Bytes(1, "long name") + Field(4, 1, "short")),
       "file.header_checksum does not end"},
      {Bytes(5, Bytes(1, "")),
       "index.files has 2 bytes, expected 16 to 1073741824"},
      {Bytes(5, least_file + Bytes(1, std::string(256, 'n'))),
       "file.name is there twice"},
      {Bytes(5, Bytes(1, std::string(256, 'n'))),
       "file.name has 256 bytes, expected 1 to 255"},
      {Bytes(6, "tiny"), "index.tensors has 4 bytes, expected 9 to"},
      {Bytes(6, Bytes(5, std::string(641, '\1'))),
       "tensor.shape has 641 bytes, expected 0 to 640"},
      {Bytes(6, Bytes(1, "long name") + Bytes(11, "")),
       "tensor.chunks has 0 bytes, expected 15 to"},
      {Bytes(6, Bytes(11, std::string(15, '\3'))),
       "byte 24: chunk has the unknown field 0 of type 3"},
      // What the rules do not see, the parser does.
      {Bytes(6, Bytes(1, "name") + Bytes(5, "\x80\x80\x80")),
       "does not hold a message of its kind"},
      {Bytes(5, least_file), "i: world is 0, expected 1 to 1048576"},
  };
  Manifest manifest = MakeManifest(MakeIndexes());
  for (const auto& c : cases) {
    const std::string bytes = Frame("1passIdx", c.message);
    manifest.mutable_indexes(0)->set_length(bytes.size());
    manifest.mutable_indexes(0)->set_checksum(
        XXH3_64bits(bytes.data(), bytes.size()));
    ExpectError(DecodeIndex(bytes, manifest, 0, "i").status(),
                absl::StatusCode::kDataLoss, c.problem);
  }
}

// --- Rules ---

struct ManifestCase {
  std::function<void(Manifest&)> change;
  const char* problem;
};

TEST(ManifestTest, EachRuleIsChecked) {
  const float kNan = std::nanf("");
  const auto group = [](const std::function<void(Group&)>& change) {
    return [change](Manifest& m) { change(*m.mutable_groups(1)); };
  };
  const auto file_name = [](const std::string& name) {
    return [name](Manifest& m) {
      m.mutable_files(0)->set_name(name);
      m.mutable_indexes(0)->set_file(name);
    };
  };
  const std::string long_name(256, 'n');
  const ManifestCase cases[] = {
      {[](Manifest& m) { m.set_step(-1); }, "step is -1, expected 0 to"},
      {[](Manifest& m) { m.set_world(0); },
       "world is 0, expected 1 to 1048576"},
      {[](Manifest& m) { m.set_world(-1); }, "world is -1"},
      {[](Manifest& m) { m.set_world((1 << 20) + 1); }, "world is 1048577"},
      {[](Manifest& m) { m.set_world(3); },
       "indexes are 2, expected 3, one a rank"},
      {[](Manifest& m) { m.set_leaf(0); }, "leaf is 0, expected at least 1"},
      {[](Manifest& m) { m.clear_layout(); }, "layout is 0, expected 1 to 2"},
      {[](Manifest& m) { m.set_layout(checkpoint::Layout(3)); },
       "layout is 3, expected 1 to 2"},
      {[](Manifest& m) { m.clear_distribution(); },
       "distribution is 0, expected 1 to 2"},
      {[](Manifest& m) { m.set_distribution(checkpoint::Distribution(3)); },
       "distribution is 3, expected 1 to 2"},
      {[](Manifest& m) { m.clear_checksum_algorithm(); },
       "checksum_algorithm is 0, expected 1"},
      {[](Manifest& m) {
         m.set_checksum_algorithm(checkpoint::ChecksumAlgorithm(2));
       },
       "checksum_algorithm is 2, expected 1"},

      {group([](Group& g) { g.clear_lr(); }), "groups[1].lr is missing"},
      {group([](Group& g) { g.clear_beta1(); }), "groups[1].beta1 is missing"},
      {group([](Group& g) { g.clear_beta2(); }), "groups[1].beta2 is missing"},
      {group([](Group& g) { g.clear_eps(); }), "groups[1].eps is missing"},
      {group([](Group& g) { g.clear_weight_decay(); }),
       "groups[1].weight_decay is missing"},
      {group([&](Group& g) { g.set_lr(kNan); }), "groups[1].lr is nan"},
      {group([&](Group& g) { g.set_beta1(INFINITY); }),
       "groups[1].beta1 is inf, expected at least 0 and below 1"},
      {group([](Group& g) { g.set_beta1(1); }), "groups[1].beta1 is 1"},
      {group([](Group& g) { g.set_beta2(-0.5f); }), "groups[1].beta2 is -0.5"},
      {group([](Group& g) { g.set_lr(-1); }),
       "groups[1].lr is -1, expected a finite number from 0 on"},
      {group([](Group& g) { g.set_eps(-1); }), "groups[1].eps is -1"},
      {group([](Group& g) { g.set_weight_decay(INFINITY); }),
       "groups[1].weight_decay is inf"},
      {group([](Group& g) { g.set_step(kMostSteps + 1); }),
       "groups[1].step is 4611686018427387905"},
      {group([](Group& g) { g.clear_mode(); }),
       "groups[1].mode is 0, expected 1 to 2"},
      {group([](Group& g) { g.set_mode(Group::Mode(3)); }),
       "groups[1].mode is 3, expected 1 to 2"},
      {group([](Group& g) { g.set_step(-2); }), "groups[1].step is -2"},
      {group([](Group& g) { g.set_parameters(0, "a"); }),
       "groups has \"a\" twice"},
      {group([](Group& g) { g.set_parameters(0, std::string("a\0", 2)); }),
       "groups[1].parameters \"a\\000\" has a NUL"},
      {group([](Group& g) { g.set_parameters(0, "\xc3"); }),
       "groups[1].parameters \"\\303\" is no UTF-8"},

      {[](Manifest& m) { m.mutable_loss_scale()->set_scale(0); },
       "loss_scale.scale is 0, expected a power of two from 2^-126"},
      {[](Manifest& m) { m.mutable_loss_scale()->set_scale(3); },
       "loss_scale.scale is 3"},
      {[](Manifest& m) { m.mutable_loss_scale()->set_scale(-2); },
       "loss_scale.scale is -2"},
      {[](Manifest& m) { m.mutable_loss_scale()->set_scale(0x1p-127); },
       "loss_scale.scale is 5.87747e-39"},
      {[&](Manifest& m) { m.mutable_loss_scale()->set_scale(kNan); },
       "loss_scale.scale is nan"},
      {[](Manifest& m) { m.mutable_loss_scale()->set_hysteresis_left(0); },
       "loss_scale.hysteresis_left is 0"},
      {[](Manifest& m) { m.mutable_loss_scale()->set_clean_steps(-1); },
       "loss_scale.clean_steps is -1"},

      {file_name("a/b"),
       "files[0].name \"a/b\" is not the name of a file in "
       "the checkpoint"},
      {file_name("/"), "files[0].name \"/\" is not the name"},
      {file_name("."), "files[0].name \".\" is not the name"},
      {file_name(".."), "files[0].name \"..\" is not the name"},
      {file_name("manifest"), "files[0].name is that of the manifest"},
      {file_name(std::string("a\0b", 3)),
       "files[0].name \"a\\000b\" has a NUL"},
      {file_name("\xed\xa0\x80"),
       "files[0].name \"\\355\\240\\200\" is no UTF-8"},
      {file_name("z"),
       "files[1].name \"rank-0.safetensors\" does not come "
       "after \"z\""},
      {[](Manifest& m) { m.mutable_files(2)->set_name("rank-0.safetensors"); },
       "files[2].name \"rank-0.safetensors\" does not come after"},
      {[](Manifest& m) { m.mutable_files(3)->set_length(-1); },
       "files[3].length is -1"},
      {[](Manifest& m) { m.mutable_files(3)->set_length(kMost); },
       "files have more bytes than fit 63 bits"},

      {[](Manifest& m) { m.mutable_indexes(1)->set_rank(0); },
       "indexes[1].rank is 0, expected 1"},
      {[](Manifest& m) { m.mutable_indexes()->SwapElements(0, 1); },
       "indexes[0].rank is 1, expected 0"},
      {[](Manifest& m) { m.mutable_indexes()->RemoveLast(); },
       "indexes are 1, expected 2"},
      {[](Manifest& m) { m.mutable_indexes(1)->set_length(27); },
       "indexes[1].length is 27, expected 28 to 1073741824"},
      {[](Manifest& m) { m.mutable_indexes(1)->set_length((1 << 30) + 1); },
       "indexes[1].length is 1073741825"},
      {[](Manifest& m) { m.mutable_indexes(1)->clear_checksum(); },
       "indexes[1].checksum is missing"},
      {[](Manifest& m) { m.mutable_indexes(1)->set_file("more"); },
       "indexes[1].file \"more\" is not in the manifest's list of files"},
      {[](Manifest& m) { m.mutable_indexes(1)->set_length(100); },
       "indexes[1].length of \"rank-1.index\" is 100, and in the manifest's "
       "list of files"},
      {[](Manifest& m) {
         m.mutable_indexes(1)->set_file("rank-0.index");
         m.mutable_indexes(1)->set_length(m.files(0).length());
       },
       "indexes[1].file \"rank-0.index\" is that of another rank, too"},
  };
  for (const ManifestCase& c : cases) {
    Manifest manifest = MakeManifest(MakeIndexes());
    c.change(manifest);
    ExpectError(EncodeManifest(manifest).status(),
                absl::StatusCode::kInvalidArgument,
                absl::StrCat("manifest.", c.problem));
    ExpectError(
        DecodeManifest(FrameManifest(manifest), "dir/manifest").status(),
        absl::StatusCode::kDataLoss, absl::StrCat("dir/manifest: ", c.problem));
  }
  // Where the encoding is checked before.
  const ManifestCase lengths[] = {
      {file_name(long_name), "has 256 bytes, expected"},
      {file_name(""), "manifest"},
      {group([](Group& g) { g.set_parameters(0, ""); }), "parameters"},
      {group([](Group& g) { g.set_parameters(0, std::string(4097, 'p')); }),
       "has 4097 bytes, expected"},
  };
  for (const ManifestCase& c : lengths) {
    Manifest manifest = MakeManifest(MakeIndexes());
    c.change(manifest);
    ExpectError(EncodeManifest(manifest).status(),
                absl::StatusCode::kInvalidArgument, c.problem);
    ExpectError(DecodeManifest(FrameManifest(manifest), "m").status(),
                absl::StatusCode::kDataLoss, c.problem);
  }
}

TEST(ManifestTest, NamesAreUtf8) {
  const auto write = [](const std::string& name) {
    Manifest manifest = MakeManifest(MakeIndexes());
    manifest.mutable_groups(0)->set_parameters(0, name);
    return EncodeManifest(manifest).status();
  };
  // The first and the last code point of each length, and around surrogates.
  for (const char* name :
       {"\x01", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
        "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80",
        "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(write(name).ok()) << write(name);
  }
  for (const char* name :
       {"\x80", "\xbf", "\xc1\xbf", "\xc2", "\xc2\x7f", "\xc2\xc0",
        "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf", "\xef\xbf",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    ExpectError(write(name), absl::StatusCode::kInvalidArgument, "is no UTF-8");
  }
}

TEST(ManifestTest, NoneIsWrittenThatIsTooLong) {
  Manifest manifest = MakeManifest(MakeIndexes());
  manifest.set_user(std::string(kMostManifestBytes, 'u'));
  ExpectError(EncodeManifest(manifest).status(),
              absl::StatusCode::kInvalidArgument, "expected at most 67108864");
}

struct IndexCase {
  std::function<void(Index&)> change;
  const char* problem;
};

// In the index of rank 1: 0 master, 1 fp16, 2 its scales, 3 bf16, 4 ä, 5 empty,
// 6 scalar, 7 e4m3, 8 its scales.
TEST(IndexTest, EachRuleIsChecked) {
  const auto tensor = [](int i, const std::function<void(Tensor&)>& change) {
    return [i, change](Index& index) { change(*index.mutable_tensors(i)); };
  };
  const auto chunk = [](int i, const std::function<void(Chunk&)>& change) {
    return [i, change](Index& index) {
      change(*index.mutable_tensors(0)->mutable_chunks(i));
    };
  };
  const auto file = [](const std::function<void(DataFile&)>& change) {
    return [change](Index& index) { change(*index.mutable_files(0)); };
  };
  const IndexCase cases[] = {
      {[](Index& i) { i.set_world(0); }, "world is 0, expected 1 to 1048576"},
      {[](Index& i) { i.set_rank(2); }, "rank is 2, expected 0 to 1"},
      {[](Index& i) { i.set_rank(-1); }, "rank is -1, expected 0 to 1"},
      {[](Index& i) { i.set_leaf(-4); }, "leaf is -4, expected at least 1"},
      {[](Index& i) { i.clear_checksum_algorithm(); },
       "checksum_algorithm is 0"},

      {file([](DataFile& f) { f.set_name("../x"); }),
       "files[0].name \"../x\" is not the name of a file"},
      {file([](DataFile& f) { f.set_name("manifest"); }),
       "files[0].name is that of the manifest"},
      {file([](DataFile& f) { f.set_length(-1); }), "files[0].length is -1"},
      {file([](DataFile& f) { f.set_header_length(8); }),
       "files[0].header_length is 8, expected 9 to"},
      {file([](DataFile& f) { f.set_header_length(f.length() + 1); }),
       "files[0].header_length is"},
      {file([](DataFile& f) {
         f.set_length(kMost);
         f.set_header_length(100000009);
       }),
       "files[0].header_length is 100000009, expected 9 to 100000008"},
      {file([](DataFile& f) { f.clear_header_checksum(); }),
       "files[0].header_checksum is missing"},
      {file([](DataFile& f) { f.set_length(f.length() + 1); }),
       "files[0] \"rank-1.safetensors\" has 157 bytes, and its tensors end at "
       "156"},
      {file([](DataFile& f) { f.set_length(f.length() - 1); }),
       "files[0] \"rank-1.safetensors\" has 155 bytes, and its tensors end at "
       "156"},
      {file([](DataFile& f) { f.set_header_length(63); }),
       "tensors[0] \"master\" begins at byte 64 of \"rank-1.safetensors\", "
       "where what is before it ends at 63"},
      {[](Index& i) { *i.add_files() = i.files(0); },
       "files has \"rank-1.safetensors\" twice"},
      {[](Index& i) {
         *i.add_files() = i.files(0);
         i.mutable_files(1)->set_name("more");
       },
       "files[1] \"more\" has 156 bytes, and its tensors end at 64"},

      {tensor(0, [](Tensor& t) { t.set_name("fp16"); }),
       "tensors has \"fp16\" twice"},
      {tensor(0, [](Tensor& t) { t.set_name(std::string("\0x", 2)); }),
       "tensors[0].name \"\\000x\" has a NUL"},
      {tensor(0, [](Tensor& t) { t.set_name("\xff"); }),
       "tensors[0].name \"\\377\" is no UTF-8"},
      {tensor(0, [](Tensor& t) { t.set_step(-1); }), "tensors[0].step is -1"},
      {tensor(5, [](Tensor& t) { t.set_file(1); }),
       "tensors[5].file is 1, expected 0 to 0"},
      {tensor(5, [](Tensor& t) { t.set_file(-1); }), "tensors[5].file is -1"},
      {tensor(5, [](Tensor& t) { t.clear_element_type(); }),
       "tensors[5].state_type STATE_FP32 in the form FORM_EXACT is not stored "
       "as ELEMENT_UNKNOWN"},
      {tensor(5, [](Tensor& t) { t.set_form(checkpoint::Form(7)); }),
       "tensors[5].state_type STATE_FP32 in the form 7 is not stored as "
       "ELEMENT_F32"},
      {tensor(5,
              [](Tensor& t) { t.set_element_type(checkpoint::ELEMENT_F16); }),
       "is not stored as ELEMENT_F16"},

      {tensor(5, [](Tensor& t) { t.set_shape(1, -5); }),
       "tensors[5].shape is -5, expected at least 0"},
      {tensor(5, [](Tensor& t) { t.set_shape(1, int64_t{1} << 61); }),
       "tensors[5].shape has more elements than fit 61 bits"},
      {tensor(5, [](Tensor& t) { t.add_shape(1); }),
       "tensors[5].offset and extent have 2 and 2 dimensions, expected both 3, "
       "as the shape, or one"},
      {tensor(5, [](Tensor& t) { t.add_offset(0); }),
       "have 3 and 2 dimensions"},
      {tensor(5, [](Tensor& t) { t.mutable_extent()->RemoveLast(); }),
       "have 2 and 1 dimensions"},
      {tensor(5,
              [](Tensor& t) {
                for (int i = 0; i < 63; ++i) {
                  t.add_shape(1);
                  t.add_offset(0);
                  t.add_extent(1);
                }
              }),
       "tensors[5].dimensions is 65, expected 0 to 64"},
      {tensor(3, [](Tensor& t) { t.set_offset(1, -1); }),
       "tensors[3].offset is -1, expected 0 to 4"},
      {tensor(3, [](Tensor& t) { t.set_offset(1, 5); }),
       "tensors[3].offset is 5, expected 0 to 4"},
      {tensor(3, [](Tensor& t) { t.set_extent(1, 4); }),
       "tensors[3].extent is 4, expected 0 to 3"},
      {tensor(3, [](Tensor& t) { t.set_extent(1, kMost); }),
       "tensors[3].extent is 9223372036854775807, expected 0 to 3"},
      {tensor(3, [](Tensor& t) { t.set_extent(1, -1); }),
       "tensors[3].extent is -1"},
      {tensor(0, [](Tensor& t) { t.set_offset(0, 5); }),
       "tensors[0].extent is 6, expected 0 to 5"},

      {chunk(0, [](Chunk& c) { c.set_first(1); }),
       "tensors[0].chunks[0].first is 1, expected 0"},
      {chunk(1, [](Chunk& c) { c.set_first(4); }),
       "tensors[0].chunks[1].first is 4, expected 3"},
      {chunk(1, [](Chunk& c) { c.set_elements(0); }),
       "tensors[0].chunks[1].elements is 0, expected 1 to 3"},
      {chunk(1, [](Chunk& c) { c.set_elements(4); }),
       "tensors[0].chunks[1].elements is 4, expected 1 to 3"},
      {chunk(1,
             [](Chunk& c) {
               c.set_elements(2);
               c.set_length(8);
             }),
       "tensors[0].chunks have 5 elements, and the box 6"},
      {chunk(1, [](Chunk& c) { c.set_length(13); }),
       "tensors[0].chunks[1].length is 13, expected 12"},
      {chunk(0, [](Chunk& c) { c.set_offset(-64); }),
       "tensors[0].chunks[0].offset is -64, expected at least 0"},
      {chunk(1, [](Chunk& c) { c.set_offset(77); }),
       "tensors[0].chunks[1].offset is 77, expected 76"},
      {chunk(0, [](Chunk& c) { c.set_offset(kMost - 3); }),
       "tensors[0].chunks[0].offset is 9223372036854775804: its end does not "
       "fit"},
      {chunk(1,
             [](Chunk& c) {
               c.clear_checksum();
               c.set_offset(kMost);
             }),
       "tensors[0].chunks[1].checksum is missing"},
      {tensor(0, [](Tensor& t) { t.clear_chunks(); }),
       "tensors[0].chunks have 0 elements, and the box 6"},
      // On top of the next one, and the one after a hole.
      {tensor(0,
              [](Tensor& t) {
                for (Chunk& c : *t.mutable_chunks()) {
                  c.set_offset(c.offset() + 1);
                }
              }),
       "tensors[0] \"master\" begins at byte 65 of \"rank-1.safetensors\", "
       "where what is before it ends at 64"},
      {tensor(1,
              [](Tensor& t) {
                for (Chunk& c : *t.mutable_chunks()) {
                  c.set_offset(c.offset() - 1);
                }
              }),
       "tensors[1] \"fp16\" begins at byte 87 of"},

      {tensor(0, [](Tensor& t) { t.set_scales("fp16.scales"); }),
       "tensors[0].scales is \"fp16.scales\", expected none"},
      {tensor(1, [](Tensor& t) { t.clear_scales(); }),
       "tensors[1].scales is \"\", expected the name of a tensor"},
      {tensor(1, [](Tensor& t) { t.set_scales("more"); }),
       "tensors[1].scales \"more\" of \"fp16\" are not there"},
      {tensor(1, [](Tensor& t) { t.set_scales("master"); }),
       "tensors[1].scales \"master\" of \"fp16\" are of the type STATE_FP32"},
      {tensor(7, [](Tensor& t) { t.set_scales("fp16.scales"); }),
       "tensors[7].scales \"fp16.scales\" of \"e4m3\" are those of another "
       "tensor, too"},
      {tensor(5, [](Tensor& t) { t.set_state_type(checkpoint::STATE_SCALES); }),
       "tensors[5] \"empty\" are scales that no tensor names"},
      {tensor(2, [](Tensor& t) { t.set_step(8); }),
       "are of step 8, and it is of step 7"},
      {tensor(2, [](Tensor& t) { t.set_shape(0, 4); }),
       "\"fp16\" have the shape [4], expected [3], one a leaf"},
      {tensor(2, [](Tensor& t) { t.add_shape(1); }),
       "\"fp16\" have the shape [3, 1], expected [3]"},
      {tensor(2, [](Tensor& t) { t.set_offset(0, 0); }),
       "\"fp16\" are 2 from 0 on, expected 2 from 1 on"},
      {tensor(8,
              [](Tensor& t) {
                t.set_extent(0, 1);
                t.mutable_chunks(0)->set_elements(1);
                t.mutable_chunks(0)->set_length(4);
              }),
       "\"e4m3\" are 1 from 0 on, expected 2 from 0 on"},
      {tensor(1, [](Tensor& t) { t.set_offset(0, 3); }),
       "tensors[1].scales \"fp16.scales\" of \"fp16\" are not there for its "
       "box, which is no range of leaves of 4"},
      {tensor(1,
              [](Tensor& t) {
                t.set_extent(0, 5);
                t.mutable_chunks(1)->set_elements(2);
                t.mutable_chunks(1)->set_length(4);
              }),
       "no range of leaves of 4"},
      // No range at all.
      {tensor(7,
              [](Tensor& t) {
                t.set_extent(1, 2);
                t.mutable_chunks(1)->set_elements(1);
                t.mutable_chunks(1)->set_length(1);
              }),
       "no range of leaves of 4"},
  };
  for (const IndexCase& c : cases) {
    Index index = MakeIndex(1);
    ASSERT_EQ(index.tensors_size(), 9);
    c.change(index);
    ExpectError(EncodeIndex(index).status(), absl::StatusCode::kInvalidArgument,
                c.problem);
    const std::string bytes = FrameIndex(index);
    Manifest manifest = MakeManifest(MakeIndexes());
    manifest.mutable_indexes(1)->set_length(bytes.size());
    manifest.mutable_indexes(1)->set_checksum(
        XXH3_64bits(bytes.data(), bytes.size()));
    const absl::Status status =
        DecodeIndex(bytes, manifest, 1, "dir/i").status();
    ExpectError(status, absl::StatusCode::kDataLoss, c.problem);
    EXPECT_TRUE(absl::StartsWith(status.message(), "dir/i: ")) << status;
  }
}

TEST(IndexTest, EachTypeIsStoredAsItIs) {
  for (int state = 0; state <= checkpoint::StateType_MAX + 1; ++state) {
    for (int form = 0; form <= checkpoint::Form_MAX + 1; ++form) {
      std::string stored;
      for (int element = 0; element <= checkpoint::ElementType_MAX + 1;
           ++element) {
        Index index = MakeEmptyIndex(0);
        Tensor& tensor =
            AddTensor("t", checkpoint::StateType(state),
                      checkpoint::ElementType(element), {0}, {0}, {0}, index);
        tensor.set_form(checkpoint::Form(form));
        const absl::Status status = EncodeIndex(index).status();
        if (!absl::StrContains(status.message(), "is not stored as")) {
          absl::StrAppend(&stored, ElementType_Name(tensor.element_type()));
        }
      }
      const char* const kExact[] = {"",
                                    "ELEMENT_F32",
                                    "ELEMENT_F16",
                                    "ELEMENT_BF16",
                                    "ELEMENT_U8",
                                    "ELEMENT_I16",
                                    "ELEMENT_F32",
                                    "ELEMENT_F16",
                                    ""};
      const char* const kUnscaled[] = {"",
                                       "ELEMENT_F32",
                                       "ELEMENT_F32",
                                       "ELEMENT_F32",
                                       "ELEMENT_F32",
                                       "ELEMENT_F32ELEMENT_I16",
                                       "",
                                       "ELEMENT_F32",
                                       ""};
      EXPECT_EQ(stored, form == checkpoint::FORM_EXACT      ? kExact[state]
                        : form == checkpoint::FORM_UNSCALED ? kUnscaled[state]
                                                            : "")
          << state << " " << form;
    }
  }
}

// Scales of empty ranges, wherever these are.
TEST(IndexTest, NothingHasNoScales) {
  Index index = MakeEmptyIndex(0);
  AddTensor("t", checkpoint::STATE_E4M3_SCALED, checkpoint::ELEMENT_U8, {10},
            {3}, {0}, index)
      .set_scales("s");
  AddTensor("s", checkpoint::STATE_SCALES, checkpoint::ELEMENT_F32, {3}, {2},
            {0}, index);
  const absl::Status status = EncodeIndex(index).status();
  EXPECT_TRUE(status.ok()) << status;
}

// Tensors may lie in the files in another order than in the index.
TEST(IndexTest, AFileHasAnyOrder) {
  Index index = MakeIndex(0);
  index.mutable_tensors()->SwapElements(0, 4);
  const absl::Status status = EncodeIndex(index).status();
  EXPECT_TRUE(status.ok()) << status;
}

TEST(IndexTest, IsTheOneThatTheManifestTellsOf) {
  const std::vector<Index> indexes = MakeIndexes();
  const std::string bytes = FrameIndex(indexes[1]);
  const struct {
    std::function<void(Manifest&)> change;
    const char* problem;
  } cases[] = {
      {[](Manifest& m) { m.mutable_indexes(1)->set_length(99); },
       " bytes, and by the manifest 99"},
      {[](Manifest& m) { m.mutable_indexes(1)->set_checksum(99); },
       ", and by the manifest 0000000000000063"},
      {[](Manifest& m) { m.set_world(3); }, "i: world is 2, expected 3"},
      {[](Manifest& m) { m.set_leaf(4096); }, "i: leaf is 4, expected 4096"},
      {[](Manifest& m) {
         m.set_checksum_algorithm(checkpoint::ChecksumAlgorithm(2));
       },
       "i: checksum_algorithm is 1, expected 2"},
      {[](Manifest& m) { m.mutable_files(3)->set_name("s"); },
       "i: files[0].name \"rank-1.safetensors\" is not in the manifest's list "
       "of files"},
      {[](Manifest& m) { m.mutable_files(3)->set_length(99); },
       "i: files[0].length of \"rank-1.safetensors\" is 156, and in the "
       "manifest's list of files 99"},
  };
  for (const auto& c : cases) {
    Manifest manifest = MakeManifest(indexes);
    c.change(manifest);
    ExpectError(DecodeIndex(bytes, manifest, 1, "i").status(),
                absl::StatusCode::kDataLoss, c.problem);
  }
  Manifest manifest = MakeManifest(indexes);
  *manifest.mutable_indexes(0) = manifest.indexes(1);
  ExpectError(DecodeIndex(bytes, manifest, 0, "i").status(),
              absl::StatusCode::kDataLoss, "i: rank is 1, expected 0");
  for (const int rank : {-1, 2}) {
    ExpectError(DecodeIndex(bytes, manifest, rank, "i").status(),
                absl::StatusCode::kInvalidArgument, "and the manifest has 2");
  }
}

// --- All indexes ---

TEST(CheckFilesTest, EachIsInOneIndex) {
  std::vector<Index> indexes = MakeIndexes();
  Manifest manifest = MakeManifest(indexes);
  manifest.add_files()->set_name("stray");
  ExpectError(CheckFiles(manifest, indexes, "dir"), absl::StatusCode::kDataLoss,
              "dir: files[4] \"stray\" of the manifest is in no index");
  manifest.mutable_files()->SwapElements(0, 4);
  manifest.mutable_files(0)->set_name("a");
  ExpectError(CheckFiles(manifest, indexes, "dir"), absl::StatusCode::kDataLoss,
              "dir: files[0] \"a\" of the manifest is in no index");
  manifest = MakeManifest(indexes);
  *indexes[0].mutable_files(0) = indexes[1].files(0);
  ExpectError(CheckFiles(manifest, indexes, "dir"), absl::StatusCode::kDataLoss,
              "dir: all indexes together has \"rank-1.safetensors\" twice");
  indexes[0].mutable_files(0)->set_name("rank-1.index");
  ExpectError(CheckFiles(manifest, indexes, "dir"), absl::StatusCode::kDataLoss,
              "dir: all indexes together has \"rank-1.index\" twice");
}

using Sizes = std::vector<int64_t>;
struct TestBox {
  Sizes offset;
  Sizes extent;
};

// One tensor, whose rank i has box i, after one that is whole.
std::vector<Index> MakeIndexesOf(const Sizes& shape,
                                 const std::vector<TestBox>& boxes) {
  std::vector<Index> indexes;
  for (const TestBox& box : boxes) {
    indexes.push_back(MakeEmptyIndex(static_cast<int>(indexes.size())));
    AddTensor("t", checkpoint::STATE_FP32, checkpoint::ELEMENT_F32, shape,
              box.offset, box.extent, indexes.back());
  }
  return indexes;
}

TEST(CheckBoxesTest, RanksHaveEachElementOnce) {
  const struct {
    Sizes shape;
    std::vector<TestBox> boxes;
    const char* problem;  // null: none
  } cases[] = {
      // Ranges.
      {{2, 5}, {{{0}, {4}}, {{4}, {6}}}, nullptr},
      {{2, 5}, {{{4}, {6}}, {{7}, {0}}, {{0}, {4}}}, nullptr},
      {{2, 5}, {{{0}, {4}}, {{5}, {5}}}, "no rank has element 4 of 10"},
      {{2, 5}, {{{1}, {9}}}, "no rank has element 0 of 10"},
      {{2, 5}, {{{0}, {9}}}, "no rank has element 9 of 10"},
      {{2, 5}, {{{0}, {5}}, {{4}, {6}}}, "ranks 0 and 1 both have element 4"},
      {{2, 5}, {{{0}, {10}}, {{0}, {10}}}, "ranks 0 and 1 both have element 0"},
      {{2, 5}, {{{0}, {10}}, {{2}, {1}}}, "ranks 0 and 1 both have element 2"},
      {{10}, {{{0}, {4}}, {{4}, {6}}}, nullptr},
      {{10}, {{{0}, {4}}, {{4}, {5}}}, "no rank has element 9 of 10"},
      // Scalars and nothing.
      {{}, {{{}, {}}}, nullptr},
      {{}, {{{0}, {1}}, {{1}, {0}}}, nullptr},
      {{}, {{{}, {}}, {{}, {}}}, "ranks 0 and 1 both have element 0"},
      {{}, {{{}, {}}, {{0}, {1}}}, "ranks 0 and 1 both have element 0"},
      {{}, {{{0}, {0}}}, "no rank has element 0 of 1"},
      {{0, 3}, {{{0, 0}, {0, 3}}, {{0}, {0}}}, nullptr},
      // Boxes.
      {{2, 4}, {{{0, 0}, {2, 4}}}, nullptr},
      {{2, 4}, {{{0, 0}, {2, 4}}, {{2, 3}, {0, 1}}}, nullptr},
      {{2, 4}, {{{0, 0}, {2, 1}}, {{0, 1}, {2, 3}}}, nullptr},
      {{2, 4}, {{{0, 0}, {2, 1}}, {{1, 1}, {1, 3}}, {{0, 1}, {1, 3}}}, nullptr},
      {{2, 4},
       {{{0, 0}, {2, 1}}, {{1, 1}, {1, 3}}, {{0, 1}, {1, 2}}},
       "all ranks together have 7 elements of 8"},
      {{2, 4},
       {{{0, 2}, {2, 2}}, {{0, 0}, {1, 3}}, {{1, 0}, {1, 2}}},
       "the boxes of ranks 0 and 1 overlap"},
      {{2, 4}, {{{0, 0}, {2, 4}}, {{1, 1}, {1, 1}}}, "ranks 0 and 1 overlap"},
      {{2, 4},
       {{{0, 0}, {2, 1}}, {{2}, {6}}},
       "rank 1 has a range of its elements, and others have boxes"},
      {{2, 4}, {{{0, 0}, {2, 1}}, {{0, 1}, {2, 3}}, {{3}, {0}}}, nullptr},
      {{2, 4},
       {{{0, 0}, {2, 4}}, {{3}, {2}}},
       "ranks 0 and 1 both have element 3"},
  };
  for (const auto& c : cases) {
    const std::vector<Index> indexes = MakeIndexesOf(c.shape, c.boxes);
    const absl::Status status = CheckBoxes(indexes, "dir");
    if (c.problem == nullptr) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      ExpectError(status, absl::StatusCode::kDataLoss,
                  absl::StrCat("dir: tensor \"t\": "));
      ExpectError(status, absl::StatusCode::kDataLoss, c.problem);
    }
  }
}

TEST(CheckBoxesTest, RanksAgree) {
  const struct {
    std::function<void(Tensor&)> change;
    const char* field;
  } cases[] = {
      {[](Tensor& t) { t.set_shape(0, 3); }, "shape"},
      {[](Tensor& t) { t.add_shape(1); }, "shape"},
      {[](Tensor& t) { t.set_state_type(checkpoint::STATE_BF16); },
       "state_type"},
      {[](Tensor& t) { t.set_form(checkpoint::FORM_UNSCALED); }, "form"},
      {[](Tensor& t) { t.set_element_type(checkpoint::ELEMENT_I16); },
       "element_type"},
      {[](Tensor& t) { t.set_scales("s"); }, "scales"},
      {[](Tensor& t) { t.set_step(8); }, "step"},
  };
  for (const auto& c : cases) {
    std::vector<Index> indexes =
        MakeIndexesOf({10}, {{{0}, {4}}, {{4}, {6}}, {{10}, {0}}});
    // Of the one that has nothing, too.
    c.change(*indexes[2].mutable_tensors(0));
    ExpectError(CheckBoxes(indexes, "dir"), absl::StatusCode::kDataLoss,
                absl::StrCat("tensor \"t\": ", c.field,
                             " is not the same on ranks 0 and 2"));
  }
}

// Against counting each element, over boxes that cut a tensor, some of them
// changed a little.
TEST(CheckBoxesTest, FindsWhatCountingFinds) {
  std::minstd_rand random(1);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint32_t>(n));
  };
  int good = 0;
  for (int round = 0; round < 2000; ++round) {
    const Sizes shape = {1 + below(4), 1 + below(4), 1 + below(4)};
    std::vector<TestBox> boxes = {{{0, 0, 0}, shape}};
    for (int64_t cuts = below(8); cuts > 0; --cuts) {
      const size_t i = below(static_cast<int64_t>(boxes.size()));
      const int d = static_cast<int>(below(3));
      TestBox rest = boxes[i];
      const int64_t at = below(rest.extent[d] + 1);
      boxes[i].extent[d] = at;
      rest.offset[d] += at;
      rest.extent[d] -= at;
      boxes.push_back(rest);
    }
    for (int64_t changes = below(3); changes > 0; --changes) {
      TestBox& box = boxes[below(static_cast<int64_t>(boxes.size()))];
      const int d = static_cast<int>(below(3));
      box.offset[d] = below(shape[d] + 1);
      box.extent[d] = below(shape[d] - box.offset[d] + 1);
    }
    std::vector<int> count(shape[0] * shape[1] * shape[2]);
    for (const TestBox& box : boxes) {
      for (int64_t i = 0; i < box.extent[0]; ++i) {
        for (int64_t j = 0; j < box.extent[1]; ++j) {
          for (int64_t k = 0; k < box.extent[2]; ++k) {
            ++count[((box.offset[0] + i) * shape[1] + box.offset[1] + j) *
                        shape[2] +
                    box.offset[2] + k];
          }
        }
      }
    }
    bool once = true;
    for (const int c : count) once &= c == 1;
    good += once;
    const absl::Status status = CheckBoxes(MakeIndexesOf(shape, boxes), "dir");
    EXPECT_EQ(status.ok(), once) << status;
  }
  EXPECT_GT(good, 200);
  EXPECT_LT(good, 1800);
}

// Stripes need no comparison, a grid those of its rows.
TEST(CheckBoxesTest, WorkIsBounded) {
  std::vector<TestBox> stripes;
  std::vector<TestBox> grid;
  for (int64_t i = 0; i < 64; ++i) {
    stripes.push_back({{0, i}, {8, 1}});
    grid.push_back({{i / 8, 8 * (i % 8)}, {1, 8}});
  }
  EXPECT_TRUE(CheckBoxes(MakeIndexesOf({8, 64}, stripes), "dir", 0).ok());
  const std::vector<Index> indexes = MakeIndexesOf({8, 64}, grid);
  const int64_t needed = 8 * (8 * 7 / 2) * 2;
  EXPECT_TRUE(CheckBoxes(indexes, "dir", needed).ok());
  ExpectError(CheckBoxes(indexes, "dir", needed - 1),
              absl::StatusCode::kDataLoss,
              "dir: tensor \"t\": the boxes are too many to compare");
}

}  // namespace
}  // namespace onepass
