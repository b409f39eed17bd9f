#include "bench_record.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace hexpert::tools {
namespace {

template <typename F>
double median_of(const std::vector<Sample>& samples, const F& f) {
  std::vector<double> values;
  values.reserve(samples.size());
  for (const Sample& sample : samples)
    values.push_back(f(sample));
  return median(std::move(values));
}

std::string percent(double ratio) {
  return ratio > 0 ? fmt::format("{:.0f}%", 100 * ratio) : "-";
}

}  // namespace

double BenchRow::seconds(double q) const {
  std::vector<double> values;
  values.reserve(samples.size());
  for (const Sample& sample : samples)
    values.push_back(sample.seconds);
  return quantile(std::move(values), q);
}
double BenchRow::useful_gbs() const {
  return median_of(samples, [](const Sample& s) { return s.useful_bytes / s.seconds * 1e-9; });
}
double BenchRow::gops() const {
  return median_of(samples, [](const Sample& s) { return s.operations / s.seconds * 1e-9; });
}
double BenchRow::read_ratio() const {
  return median_of(samples,
                   [](const Sample& s) { return s.useful_bytes / s.seconds * 1e-9 / s.read_gbs; });
}
double BenchRow::compute_ratio() const {
  return median_of(samples, [](const Sample& s) {
    return s.peak_gops > 0 ? s.operations / s.seconds * 1e-9 / s.peak_gops : 0;
  });
}
double BenchRow::roofline_ratio() const {
  return median_of(samples, [](const Sample& s) {
    const double read_floor = s.useful_bytes * 1e-9 / s.read_gbs;
    const double compute_floor = s.peak_gops > 0 ? s.operations * 1e-9 / s.peak_gops : 0;
    return std::max(read_floor, compute_floor) / s.seconds;
  });
}

nlohmann::json BenchRow::json() const {
  return {{"stage", stage},
          {"model", model},
          {"backend", backend},
          {"tokens", tokens},
          {"samples", samples.size()},
          {"ms",
           {{"median", seconds() * 1e3}, {"p10", seconds(0.1) * 1e3}, {"p90", seconds(0.9) * 1e3}}},
          {"useful_gbs", useful_gbs()},
          {"gflops", gops()},
          {"ceiling_read_gbs", median_of(samples, [](const Sample& s) { return s.read_gbs; })},
          {"ceiling_gflops", median_of(samples, [](const Sample& s) { return s.peak_gops; })},
          {"ceiling_unit", to_string(unit)},
          {"read_ratio", read_ratio()},
          {"compute_ratio", compute_ratio()},
          {"roofline_ratio", roofline_ratio()},
          {"check", check}};
}

Table layer_table(std::FILE* out) {
  return Table(out,
               {{"model", 16, true},
                {"tokens", 6},
                {"backend", 15, true},
                {"ms", 6},
                {"p10", 6},
                {"p90", 6},
                {"tokens/s", 8},
                {"GB/s", 5},
                {"of read", 7},
                {"GFLOP/s", 7},
                {"of peak", 7},
                {"of roofline", 11}});
}

std::vector<std::string> layer_cells(const BenchRow& row) {
  return {row.model,
          std::to_string(row.tokens),
          row.backend,
          format_ms(row.seconds()),
          format_ms(row.seconds(0.1)),
          format_ms(row.seconds(0.9)),
          fmt::format("{:.0f}", static_cast<double>(row.tokens) / row.seconds()),
          fmt::format("{:.1f}", row.useful_gbs()),
          percent(row.read_ratio()),
          fmt::format("{:.0f}", row.gops()),
          percent(row.compute_ratio()),
          percent(row.roofline_ratio())};
}

Table stage_table(std::FILE* out) {
  return Table(out,
               {{"stage", 8, true},
                {"model", 16, true},
                {"tokens", 8},
                {"ms", 6},
                {"p10", 6},
                {"p90", 6},
                {"BF16 GB/s", 9},
                {"of read", 7}});
}

std::vector<std::string> stage_cells(const BenchRow& row) {
  return {row.stage,
          row.model,
          row.tokens > 0 ? std::to_string(row.tokens) : "-",
          format_ms(row.seconds()),
          format_ms(row.seconds(0.1)),
          format_ms(row.seconds(0.9)),
          fmt::format("{:.1f}", row.useful_gbs()),
          percent(row.read_ratio())};
}

}  // namespace hexpert::tools
