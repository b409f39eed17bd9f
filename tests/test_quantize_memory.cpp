// The memory of quantize_checkpoint does not grow with the checkpoint.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "files.hpp"
#include "hexpert/checkpoint.hpp"

namespace hexpert {
namespace {

constexpr int64_t kShards = 4;
constexpr int64_t kExperts = 32;
constexpr int64_t kHidden = 2048;
constexpr int64_t kIntermediate = 768;
constexpr int64_t kBytes = kShards * kExperts * 3 * kHidden * kIntermediate * 2;

// One layer, all zeros: behind the header the file is a hole, which takes no disk.
void write_shard(const std::string& path, int64_t layer) {
  std::string header = "{";
  int64_t end = 0;
  for (int64_t e = 0; e < kExperts; ++e) {
    for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
      const bool down = projection[0] == 'd';
      const int64_t begin = end;
      end += 2 * kHidden * kIntermediate;
      header += std::string(header.size() == 1 ? "" : ",") + "\"layers." + std::to_string(layer) +
                ".mlp.experts." + std::to_string(e) + "." + projection +
                ".weight\":{\"dtype\":\"BF16\",\"shape\":[" +
                std::to_string(down ? kHidden : kIntermediate) + "," +
                std::to_string(down ? kIntermediate : kHidden) + "],\"data_offsets\":[" +
                std::to_string(begin) + "," + std::to_string(end) + "]}";
    }
  }
  const std::string text = test::raw_safetensors(header + "}", 0);
  test::write_bytes(path, text);
  std::filesystem::resize_file(path, text.size() + static_cast<std::size_t>(end));
}

TEST(QuantizeMemory, IsASmallPartOfAGigabyte) {
  constexpr int64_t kMost = int64_t{96} << 20;
  static_assert(kBytes >= 12 * kMost);
  const test::TempDir dir;
  for (int64_t i = 0; i < kShards; ++i)
    write_shard(dir / ("in" + std::to_string(i) + ".safetensors"), i);
  for (const Arrangement arrangement : {Arrangement::kModelOpt, Arrangement::kCanonical}) {
    const std::string out = dir / "out";
    const pid_t child = ::fork();  // its high-water mark is its own
    if (child == 0) {
      QuantizeCheckpointOptions options;
      options.arrangement = arrangement;
      options.max_shard_bytes = int64_t{50} << 20;
      const Result<Checkpoint> input = Checkpoint::open(dir.path());
      ::_exit(input.ok() && quantize_checkpoint(*input, out, options).ok() ? 0 : 1);
    }
    int status = 0;
    rusage usage{};
    ASSERT_EQ(::wait4(child, &status, 0, &usage), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_LT(usage.ru_maxrss * 1024, kMost);
    EXPECT_EQ(Checkpoint::open(out)->layers().size(), static_cast<std::size_t>(kShards));
    std::filesystem::remove_all(out);
  }
}

}  // namespace
}  // namespace hexpert
