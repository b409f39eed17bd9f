#include "commands.hpp"

int main(int argc, char** argv) {
  return hexpert::tools::run_command_line(argc, argv);
}
