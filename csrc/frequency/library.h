// A vendor library loaded at run time.
#pragma once

#include <dlfcn.h>

#include <string>
#include <vector>

#include "driver.h"

namespace megatron_elastic::frequency {

class Library {
 public:
  // Tries `path` when given, else each of `usual`. Throws Unavailable.
  Library(const std::string& path, const std::vector<std::string>& usual) {
    const std::vector<std::string> names = path.empty() ? usual : std::vector<std::string>{path};
    std::string why;
    for (const std::string& name : names) {
      handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (handle_) return;
      const char* error = dlerror();
      if (why.empty()) why = error ? error : name;
    }
    throw Unavailable("cannot load " + names.front() + ": " + why);
  }

  ~Library() {
    if (handle_) dlclose(handle_);
  }

  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  template <class Function>
  void bind(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (!function) throw Unavailable(std::string("the driver library has no ") + name + ": too old");
  }

 private:
  void* handle_ = nullptr;
};

}  // namespace megatron_elastic::frequency
