// hexpert quantize: a checkpoint with its experts in NVFP4.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>

#include "checkpoint_options.hpp"
#include "commands.hpp"
#include "common.hpp"
#include "hexpert/checkpoint.hpp"
#include "option_values.hpp"

namespace hexpert::tools {
namespace {

struct QuantizeCommand {
  std::string input;
  std::string output;
  StackedLayout stacked = StackedLayout::kAuto;
  QuantizeCheckpointOptions options;
  bool experts_only = false;
  bool progress = false;
  bool quiet = false;
};

// One line on stderr, redrawn at most ten times a second.
class ProgressBar {
 public:
  void update(const QuantizeProgress& progress) {
    constexpr double kInterval = 0.1;
    const double now = now_seconds();
    const bool last = progress.bytes_done >= progress.bytes_total;
    if (first_bytes_ < 0) first_bytes_ = progress.bytes_done;
    if (!last && now - drawn_ < kInterval) return;
    drawn_ = now;
    const double seconds = std::max(now - start_, 1e-9);
    const double rate = static_cast<double>(progress.bytes_done - first_bytes_) / seconds;
    const double rest = static_cast<double>(progress.bytes_total - progress.bytes_done);
    const double done = progress.bytes_total == 0 ? 1.0
                                                  : static_cast<double>(progress.bytes_done) /
                                                        static_cast<double>(progress.bytes_total);
    const int filled = static_cast<int>(done * kWidth);
    const auto left = static_cast<int64_t>(rate > 0 ? rest / rate : 0);
    const std::string line =
        fmt::format("\r[{:<{}}] {:5.1f} %  {:.2f} GB/s  {}:{:02} left  {:<32.32}",
                    std::string(static_cast<std::size_t>(filled), '#'),
                    kWidth,
                    100 * done,
                    rate / 1e9,
                    left / 60,
                    left % 60,
                    printable(progress.item));
    std::fputs(line.c_str(), stderr);  // which may be closed
    std::fflush(stderr);
    shown_ = true;
  }
  void finish() const {
    if (shown_) std::fputs("\n", stderr);
  }

 private:
  static constexpr int kWidth = 30;
  double start_ = now_seconds();
  double drawn_ = 0;
  int64_t first_bytes_ = -1;  // done before this run: reused files
  bool shown_ = false;
};

int quantize(QuantizeCommand command) {
  // A file past the size limit must be an error with a message, not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  const Checkpoint checkpoint = Checkpoint::open(command.input, command.stacked).value();
  ProgressBar bar;
  command.options.copy_other_tensors = !command.experts_only;
  if (!command.quiet && (command.progress || ::isatty(STDERR_FILENO) != 0)) {
    command.options.progress = [&bar](const QuantizeProgress& progress) { bar.update(progress); };
  }
  const double start = now_seconds();
  const Result<QuantizeSummary> result =
      quantize_checkpoint(checkpoint, command.output, command.options);
  bar.finish();
  const QuantizeSummary& summary = result.value();
  if (command.quiet) return kExitOk;
  const double seconds = std::max(now_seconds() - start, 1e-9);
  fmt::print("{}: {} experts of {} layers, {} -> {} ({:.2f}x smaller)\n",
             printable(command.output),
             summary.experts,
             summary.layers,
             format_bytes(summary.expert_bytes_in),
             format_bytes(summary.expert_bytes_out),
             static_cast<double>(summary.expert_bytes_in) /
                 static_cast<double>(std::max<int64_t>(summary.expert_bytes_out, 1)));
  fmt::print("{} of other tensors copied, {} files{}, {:.1f} s, {:.2f} GB/s\n",
             format_bytes(summary.other_bytes),
             summary.files,
             summary.files_reused == 0
                 ? std::string()
                 : fmt::format(" ({} from the interrupted run)", summary.files_reused),
             seconds,
             static_cast<double>(summary.expert_bytes_in + summary.other_bytes) / seconds / 1e9);
  return kExitOk;
}

}  // namespace

void add_quantize(CLI::App& parent, int* exit_code) {
  CLI::App* sub =
      parent.add_subcommand("quantize", "Write a checkpoint with its experts in NVFP4.");
  sub->footer(
      "OUT is one file when it ends in .safetensors, else a directory of shards with an index. It\n"
      "is written beside (OUT.partial) and renamed when whole. A directory that was interrupted "
      "is\n"
      "taken up after its last finished shard. Memory stays at one expert and a few buffers.\n"
      "\n"
      "  modelopt    per projection: weight U8, weight_scale F8_E4M3, weight_scale_2 F32\n"
      "  canonical   per layer: padded, interleaved, swizzled, as block-scaled MMA kernels read "
      "it\n"
      "\n"
      "Examples:\n"
      "  hexpert quantize model/ model-nvfp4/\n"
      "  hexpert quantize model.safetensors layer3.safetensors --layer model.layers.3.mlp "
      "--experts-only");
  const auto command = std::make_shared<QuantizeCommand>();
  QuantizeCheckpointOptions& options = command->options;
  sub->add_option("IN", command->input, ".safetensors file, directory or .index.json")->required();
  sub->add_option("OUT", command->output, "output file or directory")->required();
  add_choice<Arrangement>(
      sub,
      "--arrangement",
      &options.arrangement,
      {{"modelopt", Arrangement::kModelOpt}, {"canonical", Arrangement::kCanonical}},
      "how the experts are written");
  sub->add_option("--layer", options.layers, "only this layer, by prefix; may be repeated")
      ->allow_extra_args(false);
  add_stacked_option(sub, &command->stacked);
  sub->add_flag("--experts-only", command->experts_only, "leave all other tensors out");
  sub->add_option("--shard-bytes", options.max_shard_bytes, "largest file of a directory")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 50))
      ->capture_default_str();
  sub->add_flag("--overwrite", options.overwrite, "replace OUT if it is a file");
  sub->add_option("--threads", options.num_threads, "threads; 0: all")->check(CLI::Range(0, 1024));
  sub->add_flag("--progress", command->progress, "progress bar even if stderr is no terminal");
  sub->add_flag("--quiet", command->quiet, "no progress, no summary");
  sub->callback([command, exit_code] { *exit_code = quantize(*command); });
}

}  // namespace hexpert::tools
