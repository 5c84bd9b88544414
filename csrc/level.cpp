// Everything that is compiled once for each instruction set, with that set's flags. It must not use
// anything of the standard library that is more than a declaration: the linker keeps one copy of an
// inline function, and that copy may be the one for a processor that is not here.
#include <type_traits>

#include "recurrence.hpp"

namespace TGDU_LEVEL {

// Calls `use` with the cell of a problem, as a type.
template <class T, class Use> Size with_cell(const tgdu_problem& p, Use use) {
  switch (p.cell) {
    case TGDU_SRN: return use(static_cast<Srn<T>*>(nullptr));
    case TGDU_LSTM: return use(static_cast<Lstm<T>*>(nullptr));
    case TGDU_GRU: return use(static_cast<Gru<T>*>(nullptr));
    case TGDU_GRU_AFTER: return use(static_cast<GruAfter<T>*>(nullptr));
    case TGDU_UGRNN: return use(static_cast<Ugrnn<T>*>(nullptr));
    case TGDU_MGU: return use(static_cast<Mgu<T, false>*>(nullptr));
    case TGDU_MGU_BETA: return use(static_cast<Mgu<T, true>*>(nullptr));
    case TGDU_CWRNN: return use(static_cast<Cwrnn<T>*>(nullptr));
    case TGDU_GDU: return use(static_cast<Gdu<T>*>(nullptr));
    default: return -1;
  }
}

template <class T> Size saved(const tgdu_problem& p) {
  return with_cell<T>(p, [&](auto* cell) {
    return saved_bytes<T, std::remove_pointer_t<decltype(cell)>>(p);
  });
}
template <class T> Size run(const tgdu_problem& p, bool backward) {
  const Size result = with_cell<T>(p, [&](auto* cell) {
    return run<T, std::remove_pointer_t<decltype(cell)>>(p, backward);
  });
  return result < 0 ? Size(TGDU_BAD) : result;
}

template <class T> double spin(Size rounds) {
  constexpr int chains = TGDU_REGISTERS - 4;
  Vec<T> sum[chains], factor = all(T(0.999)), term = all(T(0.001));
  for (int k = 0; k < chains; ++k) sum[k] = all(T(k));
  for (Size i = 0; i < rounds; ++i)
#pragma GCC unroll 32
    for (int k = 0; k < chains; ++k) sum[k] = sum[k] * factor + term;
  for (int k = 1; k < chains; ++k) sum[0] += sum[k];
  volatile T seen = sum[0][0];
  (void)seen;
  return 2.0 * double(rounds) * chains * lanes<T>;
}

extern const tgdu_level level;
const tgdu_level level = {
    TGDU_NAME,
    [](const tgdu_problem& p) -> std::int64_t {
      return p.dtype == TGDU_FLOAT32 ? saved<float>(p) : saved<double>(p);
    },
    [](const tgdu_problem& p, bool backward) -> std::int64_t {
      return p.dtype == TGDU_FLOAT32 ? run<float>(p, backward) : run<double>(p, backward);
    },
    [](std::int64_t dtype, std::int64_t rounds) {
      return dtype == TGDU_FLOAT32 ? spin<float>(rounds) : spin<double>(rounds);
    },
};

}  // namespace TGDU_LEVEL
