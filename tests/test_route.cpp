// The routing sort: golden vectors, a dense check of every output, properties.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <limits>
#include <tuple>

#include "golden.hpp"
#include "hexpert/format.hpp"
#include "route/route.hpp"
#include "support.hpp"

namespace hexpert {
namespace {

using test::golden;

constexpr int32_t kPoison = 0x5A5A5A5A;

struct Problem {
  int64_t rows = 0;
  int64_t top_k = 1;
  int64_t offset = 0;
  int64_t local = 1;
};

struct Compact {
  std::vector<int32_t> expert_offsets, permuted_to_expanded, expanded_to_permuted;
  bool operator==(const Compact&) const = default;
};
template <typename Id>
Compact compact(const std::vector<Id>& ids, const Problem& p) {
  Compact out{std::vector<int32_t>(static_cast<size_t>(p.local + 1), kPoison),
              std::vector<int32_t>(ids.size(), kPoison),
              std::vector<int32_t>(ids.size(), kPoison)};
  route_compact(ids.data(),
                sizeof(Id) == 8,
                p.rows,
                p.top_k,
                p.offset,
                p.local,
                {.expert_offsets = out.expert_offsets.data(),
                 .permuted_to_expanded = out.permuted_to_expanded.data(),
                 .expanded_to_permuted = out.expanded_to_permuted.data()});
  return out;
}

struct Tiled {
  std::vector<int32_t> expert_ends, tile_to_expert, tile_row_limit, expanded_to_permuted,
      permuted_to_expanded;
  int64_t num_tiles = 0;
  bool operator==(const Tiled&) const = default;
};
template <typename Id>
Tiled tiled(const std::vector<Id>& ids, const Problem& p, int64_t tile) {
  const auto max_tiles = static_cast<size_t>(max_route_tiles(p.rows, p.top_k, p.local, tile));
  Tiled out{std::vector<int32_t>(static_cast<size_t>(p.local), kPoison),
            std::vector<int32_t>(max_tiles, kPoison),
            std::vector<int32_t>(max_tiles, kPoison),
            std::vector<int32_t>(ids.size(), kPoison),
            std::vector<int32_t>(max_tiles * static_cast<size_t>(tile), kPoison)};
  out.num_tiles = route_tokens(ids.data(),
                               sizeof(Id) == 8,
                               p.rows,
                               p.top_k,
                               p.offset,
                               p.local,
                               tile,
                               {.expert_ends = out.expert_ends.data(),
                                .tile_to_expert = out.tile_to_expert.data(),
                                .tile_row_limit = out.tile_row_limit.data(),
                                .expanded_to_permuted = out.expanded_to_permuted.data(),
                                .permuted_to_expanded = out.permuted_to_expanded.data()});
  return out;
}

// Every output follows from these statements, and no other output satisfies them.
template <typename Id>
void expect_sorted(const std::vector<Id>& ids, const Problem& p) {
  const Compact got = compact(ids, p);
  ASSERT_EQ(got.expert_offsets[0], 0);
  size_t row = 0;
  for (int64_t e = 0; e < p.local; ++e) {
    for (size_t x = 0; x < ids.size(); ++x) {
      if (ids[x] != p.offset + e) continue;
      ASSERT_EQ(got.permuted_to_expanded[row], static_cast<int32_t>(x));
      ASSERT_EQ(got.expanded_to_permuted[x], static_cast<int32_t>(row));
      ++row;
    }
    ASSERT_EQ(got.expert_offsets[static_cast<size_t>(e + 1)], static_cast<int32_t>(row));
  }
  for (size_t x = 0; x < ids.size(); ++x) {
    if (ids[x] < p.offset || ids[x] >= p.offset + p.local) {
      ASSERT_EQ(got.expanded_to_permuted[x], -1);
    }
  }
  for (; row < ids.size(); ++row)
    ASSERT_EQ(got.permuted_to_expanded[row], kPoison);
}

// The tiled form against the compact one.
template <typename Id>
void expect_tiled(const std::vector<Id>& ids, const Problem& p, int64_t tile) {
  const Compact rows = compact(ids, p);
  const Tiled got = tiled(ids, p, tile);
  std::vector<int32_t> expanded(ids.size(), -1);
  std::vector<int32_t> permuted(got.permuted_to_expanded.size(), -1);
  std::vector<int32_t> experts(got.tile_to_expert.size(), 0);
  std::vector<int32_t> limits(got.tile_row_limit.size(), 0);
  int64_t used = 0;
  for (int64_t e = 0; e < p.local; ++e) {
    const int32_t begin = rows.expert_offsets[static_cast<size_t>(e)];
    const int32_t end = rows.expert_offsets[static_cast<size_t>(e + 1)];
    const int64_t base = used * tile;
    for (int32_t row = begin; row < end; ++row) {
      const int32_t x = rows.permuted_to_expanded[static_cast<size_t>(row)];
      const int64_t to = base + row - begin;
      ASSERT_LT(to, static_cast<int64_t>(permuted.size()));
      permuted[static_cast<size_t>(to)] = x;
      expanded[static_cast<size_t>(x)] = static_cast<int32_t>(to);
    }
    for (; used * tile < base + end - begin; ++used) {
      ASSERT_LT(used, static_cast<int64_t>(experts.size())) << "more tiles than the bound";
      experts[static_cast<size_t>(used)] = static_cast<int32_t>(e);
      limits[static_cast<size_t>(used)] =
          static_cast<int32_t>(std::min((used + 1) * tile, base + end - begin));
    }
  }
  ASSERT_EQ(got.num_tiles, used);
  ASSERT_EQ(got.expanded_to_permuted, expanded);
  ASSERT_EQ(got.permuted_to_expanded, permuted);
  ASSERT_EQ(got.tile_to_expert, experts);
  ASSERT_EQ(got.tile_row_limit, limits);
}

std::vector<int64_t> random_ids(const Problem& p, int64_t low, int64_t high, uint64_t seed) {
  test::Random random(seed);
  std::vector<int64_t> ids(static_cast<size_t>(p.rows * p.top_k));
  for (int64_t& id : ids)
    id = random.integer(low, high);
  return ids;
}

TEST(Route, Golden) {
  const std::vector<std::string> cases = test::Golden::instance().cases("sort");
  ASSERT_EQ(cases.size(), 6U);
  for (const std::string& name : cases) {
    SCOPED_TRACE(name);
    const std::vector<int32_t> config = golden("sort", name, "config").values<int32_t>();
    const test::GoldenArray map = golden("sort", name, "routing_map");
    const std::vector<int32_t> ids = map.values<int32_t>();
    const Problem p{map.shape[0], config[3], config[1], config[2]};
    const int64_t tile = config[4];
    const auto check = [&](const Tiled& got) {
      EXPECT_EQ(got.tile_to_expert, golden("sort", name, "tile_to_expert").values<int32_t>());
      EXPECT_EQ(got.tile_row_limit, golden("sort", name, "tile_row_limit").values<int32_t>());
      EXPECT_EQ(got.expanded_to_permuted,
                golden("sort", name, "expanded_to_permuted").values<int32_t>());
      EXPECT_EQ(got.permuted_to_expanded,
                golden("sort", name, "permuted_to_expanded").values<int32_t>());
      EXPECT_EQ(got.num_tiles, golden("sort", name, "num_tiles").values<int32_t>()[0]);
    };
    check(tiled(ids, p, tile));
    check(tiled(std::vector<int64_t>(ids.begin(), ids.end()), p, tile));
    expect_sorted(ids, p);
  }
}

TEST(Route, UpperBoundOfTiles) {
  EXPECT_EQ(max_route_tiles(16384, 8, 256, 128), 1278);
  EXPECT_EQ(max_route_tiles(16384, 8, 256, 256), 767);
  EXPECT_EQ(max_route_tiles(16384, 8, 32, 128), 1055);
  EXPECT_EQ(max_route_tiles(4096, 2, 8, 128), 71);
  EXPECT_EQ(max_route_tiles(4, 8, 32, 128), 32);
  EXPECT_EQ(max_route_tiles(1, 8, 32, 128), 8);
  EXPECT_EQ(max_route_tiles(32768, 22, 512, 256), 3326);
  EXPECT_EQ(max_route_tiles(0, 8, 32, 128), 0);
}

TEST(Route, CountsAndPermutation) {
  constexpr int64_t kExperts[][3] = {{4, 4, 0},
                                     {8, 8, 0},
                                     {8, 4, 0},
                                     {8, 4, 4},
                                     {8, 2, 2},
                                     {8, 1, 7},
                                     {32, 8, 0},
                                     {32, 8, 24},
                                     {128, 32, 0},
                                     {128, 32, 96},
                                     {16, 8, 4},
                                     {32, 16, 16}};
  for (const auto& [experts, local, offset] : kExperts) {
    for (int64_t rows : {1, 2, 7, 64, 512}) {
      for (int64_t top_k : {1, 2, 4, 6, 8}) {
        const Problem p{rows, top_k, offset, local};
        const std::vector<int64_t> ids = random_ids(p, 0, experts - 1, 7);
        expect_sorted(ids, p);
        expect_sorted(std::vector<int32_t>(ids.begin(), ids.end()), p);
        for (int64_t tile : {128, 256})
          expect_tiled(ids, p, tile);
        if (HasFatalFailure()) FAIL() << "rows " << rows << " top_k " << top_k;
      }
    }
  }
}

TEST(Route, RowsOfAnExpertFillATileOrOneMore) {
  for (int64_t tile : {128, 256}) {
    for (int64_t extra : {0, 1}) {
      constexpr int64_t kLocal = 3;
      const Problem p{kLocal * (tile + extra), 1, 5, kLocal};
      std::vector<int64_t> ids;
      for (int64_t x = 0; x < p.rows; ++x)
        ids.push_back(p.offset + x % kLocal);
      expect_tiled(ids, p, tile);
      EXPECT_EQ(tiled(ids, p, tile).num_tiles, kLocal * (1 + extra));
    }
  }
}

TEST(Route, IdsOfAnyValueAreIgnored) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const std::vector<int64_t> ids = {
      kMin, kMax, -1, int64_t{1} << 32, (int64_t{1} << 32) + 5, 65536 + 5, 4, 8, 5, 7, -5, 6};
  const Problem p{3, 4, 5, 3};
  expect_sorted(ids, p);
  EXPECT_EQ(compact(ids, p).expert_offsets, (std::vector<int32_t>{0, 1, 2, 3}));
  const std::vector<int32_t> narrow = {
      std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(), 5, -1};
  expect_sorted(narrow, {1, 4, 5, 3});
  // The largest offset leaves no room for a sum of id and offset.
  expect_sorted(std::vector<int64_t>{kMin, kMax - 1, kMax, 0}, {2, 2, kMax - 1, 1});
}

TEST(Route, NothingLocalAndNothingAtAll) {
  const Problem none{4, 2, 0, 3};
  expect_sorted(std::vector<int64_t>(8, -1), none);
  expect_tiled(std::vector<int64_t>(8, -1), none, 128);
  EXPECT_EQ(tiled(std::vector<int64_t>(8, -1), none, 128).num_tiles, 0);
  const Problem empty{0, 2, 0, 3};
  EXPECT_EQ(compact(std::vector<int32_t>{}, empty).expert_offsets,
            (std::vector<int32_t>{0, 0, 0, 0}));
  EXPECT_EQ(tiled(std::vector<int32_t>{}, empty, 256).num_tiles, 0);
}

TEST(Route, ManyRows) {
  const Problem p{4096, 8, 224, 32};
  const std::vector<int64_t> ids = random_ids(p, -1, 255, 11);
  expect_sorted(ids, p);
  expect_tiled(ids, p, 128);
  const std::vector<int64_t> same(ids.size(), 230);
  expect_sorted(same, p);
  expect_tiled(same, p, 256);
}

std::tuple<Problem, std::vector<int64_t>> arbitrary_problem() {
  Problem p;
  p.rows = *rc::gen::inRange<int64_t>(0, 40);
  p.top_k = *rc::gen::inRange<int64_t>(1, 9);
  p.local = *rc::gen::inRange<int64_t>(1, 20);
  p.offset = *rc::gen::inRange<int64_t>(0, 20);
  auto id = rc::gen::oneOf(rc::gen::inRange<int64_t>(-2, 45), rc::gen::arbitrary<int64_t>());
  return {p, *rc::gen::container<std::vector<int64_t>>(static_cast<size_t>(p.rows * p.top_k), id)};
}

RC_GTEST_PROP(RouteProperty, MatchesTheDenseDefinition, ()) {
  const auto [p, ids] = arbitrary_problem();
  expect_sorted(ids, p);
  expect_tiled(ids, p, *rc::gen::element<int64_t>(1, 2, 16, 128, 256));
  RC_ASSERT(!testing::Test::HasFailure());
}

RC_GTEST_PROP(RouteProperty, BothMapsAreInverse, ()) {
  const auto [p, ids] = arbitrary_problem();
  const Compact got = compact(ids, p);
  const int32_t local_rows = got.expert_offsets.back();
  for (int32_t row = 0; row < local_rows; ++row) {
    const int32_t x = got.permuted_to_expanded[static_cast<size_t>(row)];
    RC_ASSERT(got.expanded_to_permuted[static_cast<size_t>(x)] == row);
  }
  const auto foreign =
      std::count(got.expanded_to_permuted.begin(), got.expanded_to_permuted.end(), -1);
  RC_ASSERT(foreign + local_rows == static_cast<std::ptrdiff_t>(ids.size()));
}

RC_GTEST_PROP(RouteProperty, ShiftingIdsAndOffsetChangesNothing, ()) {
  const auto [p, small_ids] = arbitrary_problem();
  std::vector<int64_t> ids = small_ids;
  for (int64_t& id : ids)
    id %= 1000;
  const Compact before = compact(ids, p);
  Problem shifted = p;
  shifted.offset += int64_t{1} << 40;
  for (int64_t& id : ids)
    id += int64_t{1} << 40;
  RC_ASSERT(compact(ids, shifted) == before);
}

}  // namespace
}  // namespace hexpert
