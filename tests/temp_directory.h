// A new directory for the files of a test, which goes with them.
//
//   const TempDirectory directory;
//   WriteSomething(directory.path() + "/file");

#ifndef ONEPASS_TESTS_TEMP_DIRECTORY_H_
#define ONEPASS_TESTS_TEMP_DIRECTORY_H_

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "gtest/gtest.h"

namespace onepass {

class TempDirectory {
 public:
  TempDirectory() {
    // Without symbolic links and double slashes: as the system prints it.
    std::string path =
        std::filesystem::canonical(testing::TempDir()) / "test.XXXXXX";
    EXPECT_NE(mkdtemp(path.data()), nullptr) << path;
    path_ = path;
  }
  ~TempDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace onepass

#endif  // ONEPASS_TESTS_TEMP_DIRECTORY_H_
