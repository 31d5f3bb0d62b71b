#include "checkpoint/layout.h"

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "dispatch/kernel.h"
#include "dispatch/state.h"
#include "gtest/gtest.h"

namespace onepass {
namespace {

StateGroup Group(std::vector<std::string> parameters) {
  StateGroup group;
  group.parameters = std::move(parameters);
  group.step = 7;
  group.lr = 0.1f;
  group.mode = WeightDecay::kL2;
  return group;
}

TEST(LayoutTest, FlatHasAKeyForEachOptionOfEachParameter) {
  const auto flat = FlatGroups({Group({"w", "a.b"}), Group({"c"})});
  ASSERT_TRUE(flat.ok()) << flat.status();
  EXPECT_EQ(flat->size(), 3 * 8u);
  EXPECT_EQ(std::get<double>(flat->at("param_groups.a.b.lr")),
            static_cast<double>(0.1f));
  EXPECT_EQ(std::get<int64_t>(flat->at("param_groups.c.step")), 7);
  EXPECT_EQ(std::get<std::string>(flat->at("param_groups.w.mode")), "l2");
  EXPECT_TRUE(std::get<bool>(flat->at("param_groups.w.bias_correction")));
}

TEST(LayoutTest, CollisionsAreNamed) {
  const absl::Status twice = FlatGroups({Group({"w"}), Group({"w"})}).status();
  EXPECT_EQ(twice.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(twice.message(), "\"param_groups.w."));
  const absl::Status tensors =
      NestNames({"state.w.exp_avg", "state.w.exp_avg"}).status();
  EXPECT_EQ(tensors.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(tensors.message(), "state.w.exp_avg"));
  for (const char* name : {"w.exp_avg", "state.w", "state.w.", ""}) {
    EXPECT_EQ(NestNames({name}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
}

TEST(LayoutTest, NestedIsByParameterAndKind) {
  const auto nested = NestNames({"state.a.b.exp_avg", "state.a.b.exp_avg.scale",
                                 "state.a.b.master_param", "state.w.param"});
  ASSERT_TRUE(nested.ok()) << nested.status();
  EXPECT_EQ(nested->size(), 2u);
  EXPECT_EQ(nested->at("a.b").at("exp_avg.scale"), "state.a.b.exp_avg.scale");
  EXPECT_EQ(nested->at("a.b").size(), 3u);
  EXPECT_EQ(nested->at("w").at("param"), "state.w.param");
}

}  // namespace
}  // namespace onepass
