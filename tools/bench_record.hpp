// What a benchmark measured, as rows of a table and as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "ceilings.hpp"
#include "common.hpp"

namespace hexpert::tools {

// One timed piece of work with the ceilings right before and after it, averaged.
struct Sample {
  double seconds = 0;
  double read_gbs = 0;   // ceiling
  double peak_gops = 0;  // ceiling; 0 without one
  double useful_bytes = 0;
  double operations = 0;
};

struct BenchRow {
  std::string stage;  // "layer", "quantize", "prepare"
  std::string model;
  std::string backend;
  int64_t tokens = 0;
  ComputeUnit unit = ComputeUnit::kNone;
  std::vector<Sample> samples;
  std::string check;  // agreement with the reference

  // Medians over the samples, each sample against its own ceilings.
  double seconds(double q = 0.5) const;
  double useful_gbs() const;
  double gops() const;
  double read_ratio() const;
  double compute_ratio() const;   // 0 without a ceiling
  double roofline_ratio() const;  // longest of both floors / time
  nlohmann::json json() const;
};

Table layer_table(std::FILE* out);
std::vector<std::string> layer_cells(const BenchRow& row);
Table stage_table(std::FILE* out);
std::vector<std::string> stage_cells(const BenchRow& row);

}  // namespace hexpert::tools
