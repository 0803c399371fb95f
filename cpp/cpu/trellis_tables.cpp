// Shuffle tables of the packed layout, one set per rate, made on first use.
#include "cpu/trellis.h"

namespace exl3::cpu {

namespace {

// First bit of the window of position i in the little-endian tile.
int window(int k2, int i) { return ring_bits(k2) - ring_end(k2, i); }

template <class T> const T& of_rate(int k2) {
  static const T tables[16] = {T(2), T(2), T(2), T(3), T(4), T(5), T(6), T(7), T(8), T(8), T(10), T(10), T(12), T(12), T(14), T(14)};
  static const T last(16);
  return k2 == 16 ? last : tables[k2];
}

}  // namespace

// Eight windows span at most 7 * 8 + 16 bits. Even ones are shifted right to the low half of a 32-bit lane, odd ones left to the high half.
Avx2Tables::Avx2Tables(int k2) {
  for (int group = 0; group < 32; group++) {
    const int first = offset[group] = window(k2, 8 * group + 7) / 8;
    for (int lane = 0; lane < 4; lane++) {
      const int bit = window(k2, 8 * group + 2 * lane), bit_odd = window(k2, 8 * group + 2 * lane + 1);
      for (int b = 0; b < 4; b++) {
        even[group / 2][16 * (group % 2) + 4 * lane + b] = (uint8_t)(bit / 8 - first + b);
        odd[group / 2][16 * (group % 2) + 4 * lane + b] = (uint8_t)(bit_odd / 8 - first + b);
      }
      right[group / 2][4 * (group % 2) + lane] = (uint32_t)(bit % 8);
      left[group / 2][4 * (group % 2) + lane] = (uint32_t)(16 - bit_odd % 8);
    }
  }
}

// Four windows span at most 3 * 8 + 16 + 7 bits: one 64-bit lane of vpmultishiftqb.
Avx512Tables::Avx512Tables(int k2) {
  for (int chunk = 0; chunk < 8; chunk++) {
    const int first = offset[chunk] = window(k2, 32 * chunk + 31) / 8;
    for (int lane = 0; lane < 8; lane++) {
      const int base = window(k2, 32 * chunk + 4 * lane + 3) / 8;
      for (int b = 0; b < 8; b++) bytes[chunk][8 * lane + b] = (uint8_t)(base - first + b);
      for (int j = 0; j < 4; j++) {
        const int bit = window(k2, 32 * chunk + 4 * lane + j) - 8 * base;
        shifts[chunk][8 * lane + 2 * j] = (uint8_t)bit;
        shifts[chunk][8 * lane + 2 * j + 1] = (uint8_t)(bit + 8);
      }
    }
  }
}

const Avx2Tables& avx2_tables(int k2) { return of_rate<Avx2Tables>(k2); }
const Avx512Tables& avx512_tables(int k2) { return of_rate<Avx512Tables>(k2); }

}  // namespace exl3::cpu
