// How the tiles of a product of many rows are split between clusters: the host's part of what WideWalk and shares_of read.
#pragma once
#include "wide.h"

namespace exl3 {

constexpr int kMostShares = 4;        // of a tile
constexpr int kFewestSteps = 8;       // of a share
constexpr float kSplitWorth = 0.94f;  // splitting costs as much as so much idleness
constexpr float kTailWorth = 1.1f;    // and sums that all come at the end, as with even shares of less than a tile, as so much work

// How tiles are split so that all clusters have work, on a card with room for `most` of them; returns how many there are. What is split comes before
// whole tiles, so that its sums travel meanwhile.
inline int share_out(WideParams& p, int most) {
  const int rounds = (p.tiles + most - 1) / most, rest = p.tiles % most;
  const int plain = p.tiles < most ? p.tiles : most;
  if ((float)p.tiles >= kSplitWorth * (float)(rounds * most)) return plain;
  if (p.tiles >= most) {
    p.split_tiles = rest * kMostShares >= most && rest * p.steps >= kFewestSteps * most ? rest : rest + most;
    return most;
  }
  // A tile each, but for its end; clusters that have none do some ends, for each of which they take a step longer.
  const int ends = (most - 1) / (most - p.tiles), tail = (p.steps - ends) / (ends + 1);
  if (tail > 0 && (float)(p.steps - tail) * (float)most < kTailWorth * (float)(p.steps * p.tiles)) {
    p.tail = tail;
    return most < 2 * p.tiles ? most : 2 * p.tiles;
  }
  const int64_t shares = (int64_t)p.tiles * p.steps / kFewestSteps;
  int clusters = most < p.tiles * kMostShares ? most : p.tiles * kMostShares;
  if (clusters > shares) clusters = (int)shares;
  if (clusters <= p.tiles) return plain;
  p.split_tiles = p.tiles;
  return clusters;
}

}  // namespace exl3
