// The encoder of one rate; compiled once for each EXL3_K2 (twice the bits a weight).
#include "encode_half.cuh"

namespace exl3 {

#define EXL3_CONCAT_(a, b) a##b
#define EXL3_CONCAT(a, b) EXL3_CONCAT_(a, b)

#if EXL3_K2 == 2  // two cost buffers are 128 KiB: too many for the smaller cards
EncodeEntry encode_entry_2() {
  constexpr int kBytes = 2 * Search<1>::kCostBytes;
  return {{search<1, 1>, search<1, 1>}, trace_back<2>, trace_threads(2), 1, kBytes, {search_in_place<2, true>, search_in_place<2, false>}, 2 * most_nodes(2)};
}
#elif EXL3_K2 % 2 == 0
EncodeEntry EXL3_CONCAT(encode_entry_, EXL3_K2)() {
  constexpr int kRate = EXL3_K2 / 2, kBytes = 2 * Search<kRate>::kCostBytes;
  return {{search<kRate, 2>, search<kRate, 2>}, trace_back<EXL3_K2>, trace_threads(EXL3_K2), 2, 2 * kBytes, {search<kRate, 1>, search<kRate, 1>}, kBytes};
}
#elif EXL3_K2 == 3  // two tiles at a time gain little here; one is too large for the smaller cards
EncodeEntry encode_entry_3() {
  constexpr int kBytes = HalfSearch<1>::kManyBytes + HalfSearch<1>::kFewBytes;
  return {{search_half<1, 1>, nullptr}, trace_back<3>, trace_threads(3), 1, kBytes, {search_in_place<3, true>, nullptr}, 2 * most_nodes(3)};
}
#else
EncodeEntry EXL3_CONCAT(encode_entry_, EXL3_K2)() {
  constexpr int kEven = EXL3_K2 / 2, kBytes = HalfSearch<kEven>::kManyBytes + HalfSearch<kEven>::kFewBytes;
  return {{search_half<kEven, 2>, nullptr}, trace_back<EXL3_K2>, trace_threads(EXL3_K2), 2, 2 * kBytes, {search_half<kEven, 1>, nullptr}, kBytes};
}
#endif

}  // namespace exl3
