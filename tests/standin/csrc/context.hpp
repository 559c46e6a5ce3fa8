// Whether this process has used a device. torch asks before it looks at a device that a computation may not concern.
#pragma once

namespace standin {

bool has_context(int device);

}  // namespace standin
