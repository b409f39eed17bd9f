#include <fcntl.h>
#include <unistd.h>

#include "commands.hpp"

namespace {

// A closed standard stream would give its number to the next file opened, and messages would go
// into that. These stand-ins cannot be used in the direction of the stream: it stays an error.
void occupy_standard_streams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) != -1) continue;
    (void)::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_streams();
  return hexpert::tools::run_command_line(argc, argv);
}
