// A kernel that breaks the device context, for tests of what follows.
#pragma once

namespace hexpert::test {

void launch_trap();

}  // namespace hexpert::test
