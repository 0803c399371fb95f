// The encoder of one rate; compiled once for each EXL3_K2 (twice the bits a weight).
#include "encode.cuh"

namespace exl3 {

#define EXL3_CONCAT_(a, b) a##b
#define EXL3_CONCAT(a, b) EXL3_CONCAT_(a, b)

#if EXL3_K2 % 2 == 0
EncodeEntry EXL3_CONCAT(encode_entry_, EXL3_K2)() {
  using S = Search<EXL3_K2 / 2>;
  constexpr int kDouble = 2 * S::kCostBytes;
#if EXL3_K2 == 2  // 128 KiB are too many for the smaller cards
  return {search<EXL3_K2 / 2>, trace_back<EXL3_K2>, kDouble, search_in_place<EXL3_K2>, 2 * most_nodes(EXL3_K2)};
#else
  return {search<EXL3_K2 / 2>, trace_back<EXL3_K2>, kDouble, search<EXL3_K2 / 2>, kDouble};
#endif
}
#else
EncodeEntry EXL3_CONCAT(encode_entry_, EXL3_K2)() {
  constexpr int kBytes = 2 * most_nodes(EXL3_K2);
  return {search_in_place<EXL3_K2>, trace_back<EXL3_K2>, kBytes, search_in_place<EXL3_K2>, kBytes};
}
#endif

}  // namespace exl3
