#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "core/threads.hpp"
#include "format/codec.hpp"
#include "format/layout.hpp"
#include "hexpert/checkpoint.hpp"
#include "io/expert_reader.hpp"
#include "io/io_support.hpp"
#include "io/mapped_file.hpp"
#include "io/quantize_plan.hpp"

namespace hexpert {
namespace {

namespace fs = std::filesystem;
using io::in_quotes;
using io::LayerSource;
using io::OutputFile;
using io::OutputUnit;
using Projection = ExpertWeights::Projection;

// Checkpoint order -> the zeroed canonical buffers of one expert.
void scatter_canonical(const QuantizedProjection& from,
                       int64_t rows,
                       int64_t cols,
                       int64_t padded_cols,
                       bool interleaved,
                       bool gate,
                       uint8_t* data,
                       uint8_t* scales) {
  const int64_t blocks = round_up(cols, kBlockSize) / kBlockSize;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t prepared =
        interleaved ? layout::gated_row(gate, r, layout::kCanonicalInterleave) : r;
    std::memcpy(data + prepared * padded_cols / 2,
                from.codes + r * blocks * 8,
                static_cast<std::size_t>(blocks * 8));
    for (int64_t b = 0; b < blocks; ++b) {
      scales[layout::offset_128x4(prepared, b, padded_cols / kBlockSize)] =
          from.block_scales[r * blocks + b];
    }
  }
}

// Writes the units of one output file after the other.
class UnitWriter {
 public:
  UnitWriter(const QuantizeCheckpointOptions& options, QuantizeProgress* progress)
      : options_(options), progress_(progress) {}

  Status write(const OutputUnit& unit, SafetensorsWriter* writer) {
    if (unit.copy != nullptr) return copy(*unit.copy, writer);
    if (layer_ != unit.layer) {
      layer_ = unit.layer;
      has_gate_alpha_ = io::has_gate_alpha(*layer_);
      reader_ = std::make_unique<io::ExpertReader>(*layer_, options_.num_threads);
    }
    const int64_t expert_bytes = unit.source_bytes / unit.num_experts;
    for (int64_t e = unit.first_expert; e < unit.first_expert + unit.num_experts; ++e) {
      QuantizedExpert expert;
      HX_RETURN_IF_ERROR(reader_->read_quantized(e, &expert));
      if (options_.arrangement == Arrangement::kCanonical) {
        HX_RETURN_IF_ERROR(write_canonical(e, expert, writer));
      } else {
        HX_RETURN_IF_ERROR(write_modelopt(e, expert, writer));
      }
      reader_->release(e);
      report(expert_bytes, layer_->info.prefix);
    }
    if (unit.first_expert == 0 && options_.arrangement == Arrangement::kCanonical) {
      const float input_scale = std::bit_cast<float>(kPerTokenGlobalScale);
      return writer->write(
          io::canonical_name(*layer_, "fc2_input_scale"), &input_scale, sizeof(float));
    }
    return Status::success();
  }

 private:
  void report(int64_t bytes, std::string_view item) {
    progress_->bytes_done += bytes;
    progress_->item = item;
    if (options_.progress) options_.progress(*progress_);
  }

  Status copy(const io::TensorRef& tensor, SafetensorsWriter* writer) {
    constexpr int64_t kPiece = int64_t{16} << 20;
    for (int64_t done = 0; done < tensor.info->size_bytes; done += kPiece) {
      const int64_t bytes = std::min(kPiece, tensor.info->size_bytes - done);
      HX_RETURN_IF_ERROR(writer->write(tensor.info->name, tensor.data() + done, bytes, done));
      io::release_pages(tensor.data() + done, bytes);
      report(bytes, tensor.info->name);
    }
    return Status::success();
  }

  Status write_modelopt(int64_t e, const QuantizedExpert& expert, SafetensorsWriter* writer) {
    const ExpertShape& shape = layer_->info.shape;
    const auto write_projection = [&](Projection projection,
                                      const QuantizedProjection& from,
                                      int64_t rows,
                                      int64_t cols) -> Status {
      const std::string name = io::projection_name(*layer_, e, projection);
      const int64_t blocks = rows * (round_up(cols, kBlockSize) / kBlockSize);
      HX_RETURN_IF_ERROR(writer->write(name + ".weight", from.codes, blocks * 8));
      HX_RETURN_IF_ERROR(writer->write(name + ".weight_scale", from.block_scales, blocks));
      return writer->write(name + ".weight_scale_2", &from.alpha, sizeof(float));
    };
    const int64_t hidden = shape.hidden_size;
    const int64_t intermediate = shape.intermediate_size;
    if (shape.gated) {
      HX_RETURN_IF_ERROR(write_projection(Projection::kGate, expert.gate, intermediate, hidden));
    }
    HX_RETURN_IF_ERROR(write_projection(Projection::kUp, expert.up, intermediate, hidden));
    return write_projection(Projection::kDown, expert.down, hidden, intermediate);
  }

  Status write_canonical(int64_t e, const QuantizedExpert& expert, SafetensorsWriter* writer) {
    const ExpertShape& shape = layer_->info.shape;
    const int64_t hidden = shape.padded_hidden_size();
    const int64_t intermediate = shape.padded_intermediate_size();
    const auto clear = [this](int64_t elements) {
      data_.assign(static_cast<std::size_t>(elements / 2), 0);
      scales_.assign(static_cast<std::size_t>(elements / kBlockSize), 0);
    };
    const auto put = [&](const char* data_field, const char* scale_field) -> Status {
      const auto data_bytes = static_cast<int64_t>(data_.size());
      const auto scale_bytes = static_cast<int64_t>(scales_.size());
      HX_RETURN_IF_ERROR(writer->write(
          io::canonical_name(*layer_, data_field), data_.data(), data_bytes, e * data_bytes));
      return writer->write(
          io::canonical_name(*layer_, scale_field), scales_.data(), scale_bytes, e * scale_bytes);
    };
    const auto put_alpha = [&](const char* field, float alpha) {
      return writer->write(io::canonical_name(*layer_, field), &alpha, 4, e * 4);
    };
    const auto scatter_fc1 = [&](const QuantizedProjection& from, bool gate) {
      scatter_canonical(from,
                        shape.intermediate_size,
                        shape.hidden_size,
                        hidden,
                        shape.gated,
                        gate,
                        data_.data(),
                        scales_.data());
    };
    clear(shape.canonical_fc1_rows() * hidden);
    scatter_fc1(expert.up, false);
    if (shape.gated) scatter_fc1(expert.gate, true);
    HX_RETURN_IF_ERROR(put("fc1_data", "fc1_scale_swizzled"));
    HX_RETURN_IF_ERROR(put_alpha("fc1_alpha", expert.up.alpha));
    if (has_gate_alpha_) {
      HX_RETURN_IF_ERROR(put_alpha("fc1_gate_alpha", expert.gate.alpha));
    }
    clear(hidden * intermediate);
    scatter_canonical(expert.down,
                      shape.hidden_size,
                      shape.intermediate_size,
                      intermediate,
                      false,
                      false,
                      data_.data(),
                      scales_.data());
    HX_RETURN_IF_ERROR(put("fc2_data", "fc2_scale_swizzled"));
    return put_alpha("fc2_alpha", expert.down.alpha);
  }

  const QuantizeCheckpointOptions& options_;
  QuantizeProgress* progress_;
  const LayerSource* layer_ = nullptr;
  bool has_gate_alpha_ = false;
  std::unique_ptr<io::ExpertReader> reader_;
  std::vector<uint8_t> data_;  // canonical, of one expert
  std::vector<uint8_t> scales_;
};

// Whether an earlier run finished this very file.
bool is_finished(const std::string& path, const io::OutputPlan& plan, const OutputFile& file) {
  const Result<SafetensorsFile> found = SafetensorsFile::open(path);
  return found.ok() && found->metadata() == plan.metadata &&
         found->tensors().size() == file.specs.size();
}

Status write_file(const std::string& path,
                  const io::OutputPlan& plan,
                  const OutputFile& file,
                  UnitWriter* units) {
  Result<SafetensorsWriter> writer = SafetensorsWriter::create(path, file.specs, plan.metadata);
  if (!writer.ok()) return writer.status();
  for (const OutputUnit& unit : file.units)
    HX_RETURN_IF_ERROR(units->write(unit, &*writer));
  return writer->finish();
}

// Writes a small text file beside and renames it.
Status write_text(const std::string& path, const std::string& text) {
  const std::string partial = path + ".partial";
  const io::FileDescriptor file(
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file) return io::system_error("cannot create", partial);
  const auto failed = [&] {
    Status status = io::system_error("cannot write", partial);
    ::unlink(partial.c_str());
    return status;
  };
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(file.get(), text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed();
    done += static_cast<std::size_t>(n);
  }
  if (::fsync(file.get()) != 0 || ::rename(partial.c_str(), path.c_str()) != 0) return failed();
  return Status::success();
}

std::string index_text(const io::OutputPlan& plan) {
  int64_t total = 0;
  nlohmann::json map = nlohmann::json::object();
  for (const OutputFile& file : plan.files) {
    total += file.bytes;
    for (const TensorSpec& spec : file.specs)
      map[spec.name] = file.name;
  }
  return nlohmann::json({{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}})
             .dump(2) +
         "\n";
}

Status check_output(const Checkpoint& input,
                    const std::string& output,
                    bool is_file,
                    bool overwrite) {
  std::error_code error;
  for (const SafetensorsFile& file : input.files()) {
    for (const std::string& path : {output, output + ".partial"}) {
      if (fs::equivalent(file.path(), path, error) ||
          fs::equivalent(io::parent_directory(file.path()), path, error)) {
        return {ErrorCode::kInvalidArgument, in_quotes(path) + ": the output is the input"};
      }
    }
  }
  const fs::file_status status = fs::symlink_status(output, error);
  if (!fs::exists(status)) return Status::success();
  if (fs::is_directory(status)) {
    const bool empty = fs::is_empty(output, error);
    if (empty && !error) return Status::success();
    return {ErrorCode::kInvalidArgument, in_quotes(output) + ": the directory exists"};
  }
  if (is_file && overwrite) return Status::success();
  return {ErrorCode::kInvalidArgument,
          in_quotes(output) + (is_file ? ": the file exists; say overwrite to replace it"
                                       : ": expected a new directory, the file exists")};
}

// What an interrupted run of another plan left.
void remove_stale(const std::string& directory, const io::OutputPlan& plan) {
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool planned = std::any_of(
        plan.files.begin(), plan.files.end(), [&](const auto& file) { return file.name == name; });
    const bool ours =
        name.starts_with("model") && (name.ends_with(".safetensors") ||
                                      name.ends_with(".partial") || name.ends_with(".index.json"));
    if (ours && !planned) ::unlink(entry->path().c_str());
  }
}

Status write_directory(const std::string& output,
                       const io::OutputPlan& plan,
                       UnitWriter* units,
                       QuantizeProgress* progress,
                       QuantizeSummary* summary) {
  const std::string partial = output + ".partial";
  std::error_code error;
  fs::create_directories(partial, error);
  if (error) {
    return {ErrorCode::kIoError,
            in_quotes(partial) + ": cannot create directory: " + error.message()};
  }
  const io::FileDescriptor lock(
      ::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!lock) return io::system_error("cannot open directory", partial);
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return {ErrorCode::kIoError, in_quotes(partial) + ": another process is writing it"};
  }
  remove_stale(partial, plan);
  for (const OutputFile& file : plan.files) {
    const std::string path = partial + "/" + file.name;
    if (is_finished(path, plan, file)) {
      ++summary->files_reused;
      for (const OutputUnit& unit : file.units)
        progress->bytes_done += unit.source_bytes;
      continue;
    }
    if (Status written = write_file(path, plan, file, units); !written.ok()) {
      ::rmdir(partial.c_str());  // stays while it holds a finished shard
      return written;
    }
  }
  HX_RETURN_IF_ERROR(write_text(partial + "/model.safetensors.index.json", index_text(plan)));
  HX_RETURN_IF_ERROR(io::sync_directory(partial));
  if (::rename(partial.c_str(), output.c_str()) != 0) {
    return io::system_error("cannot rename from " + in_quotes(partial), output);
  }
  return io::sync_directory(io::parent_directory(output));
}

QuantizeSummary summarize(const io::OutputPlan& plan) {
  QuantizeSummary summary;
  summary.layers = plan.num_layers;
  summary.files = static_cast<int64_t>(plan.files.size());
  for (const OutputFile& file : plan.files) {
    summary.expert_bytes_out += file.bytes;
    for (const OutputUnit& unit : file.units) {
      if (unit.copy != nullptr) {
        summary.other_bytes += unit.source_bytes;
        summary.expert_bytes_out -= unit.source_bytes;
      } else {
        summary.experts += unit.num_experts;
        summary.expert_bytes_in += unit.source_bytes;
      }
    }
  }
  return summary;
}

}  // namespace

Result<QuantizeSummary> quantize_checkpoint(const Checkpoint& input,
                                            const std::string& output,
                                            const QuantizeCheckpointOptions& options) {
  return io::without_bad_alloc([&]() -> Result<QuantizeSummary> {
    HX_RETURN_IF_ERROR(check_num_threads("num_threads", options.num_threads));
    std::string target = output;
    while (target.size() > 1 && target.ends_with('/'))
      target.pop_back();
    if (target.empty() || target == "/") {
      return Status(ErrorCode::kInvalidArgument,
                    "output: expected a path, got " + in_quotes(output));
    }
    const bool single = target.ends_with(".safetensors");
    HX_RETURN_IF_ERROR(check_output(input, target, single, options.overwrite));
    const std::string name = single ? fs::path(target).filename().string() : std::string();
    const Result<io::OutputPlan> plan = io::plan_output(input, options, name);
    if (!plan.ok()) return plan.status();
    QuantizeSummary summary = summarize(*plan);
    QuantizeProgress progress;
    progress.bytes_total = plan->source_bytes;
    UnitWriter units(options, &progress);
    if (single) {
      HX_RETURN_IF_ERROR(write_file(target, *plan, plan->files[0], &units));
    } else {
      HX_RETURN_IF_ERROR(write_directory(target, *plan, &units, &progress, &summary));
    }
    return summary;
  });
}

}  // namespace hexpert
