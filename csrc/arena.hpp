// One block of memory handed out piece by piece. Without a block it only counts, so that the same
// lines of code say how much is needed and take it.
#pragma once
#include <cstdint>

#include "engine.h"

namespace TGDU_LEVEL {

class Arena {
 public:
  explicit Arena(void* block = nullptr) : block_(static_cast<char*>(block)) {}

  bool real() const { return block_ != nullptr; }
  std::int64_t used() const { return used_; }

  // Room for `count` elements, aligned to a cache line; null while counting.
  template <class T> T* take(std::int64_t count) {
    const std::int64_t at = used_;
    used_ += (count * std::int64_t(sizeof(T)) + 63) / 64 * 64;
    return block_ ? reinterpret_cast<T*>(block_ + at) : nullptr;
  }

 private:
  char* block_;
  std::int64_t used_ = 0;
};

}  // namespace TGDU_LEVEL
