// A fuzzer as an ordinary test: its corpus, and changes of it, always the same
// (fuzz_test.bzl).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace onepass {
namespace {

// Of just its size, so that what is read beyond it is found.
void Take(const std::string& input) {
  const std::vector<uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

// In the order of their names.
std::vector<std::string> ReadCorpus() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry :
       std::filesystem::directory_iterator(ONEPASS_CORPUS)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file),
                        std::istreambuf_iterator<char>());
    EXPECT_TRUE(file.good()) << path;
  }
  return corpus;
}

class Mutator {
 public:
  explicit Mutator(const std::vector<std::string>& corpus) : corpus_(corpus) {}

  // One of the corpus, with up to four changes.
  std::string Next() {
    std::string input = Any();
    for (size_t changes = 1 + Below(4); changes > 0; --changes) Change(input);
    return input;
  }

 private:
  size_t Below(size_t n) { return n == 0 ? 0 : random_() % n; }
  const std::string& Any() { return corpus_[Below(corpus_.size())]; }

  void Change(std::string& input) {
    static constexpr uint8_t kBytes[] = {0,    1,   2,   0x7f, 0x80, 0xff,
                                         '"',  '{', '}', '[',  ']',  ',',
                                         '\\', ':', '-', '9',  'e',  ' '};
    const size_t at = Below(input.size());
    const size_t length = Below(std::min<size_t>(input.size() - at, 16) + 1);
    switch (Below(6)) {
      case 0:
        if (!input.empty()) input[at] ^= static_cast<char>(1 << Below(8));
        break;
      case 1:
        if (!input.empty()) input[at] = kBytes[Below(std::size(kBytes))];
        break;
      case 2:
        input.erase(at, length);
        break;
      case 3:
        input.insert(at, input.substr(at, length));
        break;
      case 4:
        input.insert(at, 1, kBytes[Below(std::size(kBytes))]);
        break;
      default: {
        const std::string& other = Any();
        const size_t from = Below(other.size());
        input.replace(at, length, other.substr(from, Below(32)));
      }
    }
  }

  const std::vector<std::string>& corpus_;
  std::minstd_rand random_{1};
};

TEST(FuzzTest, CorpusIsTaken) {
  const std::vector<std::string> corpus = ReadCorpus();
  ASSERT_FALSE(corpus.empty());
  Take("");
  for (const std::string& input : corpus) Take(input);
}

TEST(FuzzTest, ChangesAreTaken) {
  const std::vector<std::string> corpus = ReadCorpus();
  ASSERT_FALSE(corpus.empty());
  Mutator mutator(corpus);
  for (int i = 0; i < 5000; ++i) Take(mutator.Next());
}

}  // namespace
}  // namespace onepass
