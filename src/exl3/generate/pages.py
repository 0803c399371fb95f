"""Who owns which page of the cache, and which prefixes it still holds. Numbers only: tensors are moved by the caller.

A full page is named by the hash of everything up to its end, so equal hashes mean equal prefixes. A page is *referenced* by the jobs that
read it; an unreferenced page keeps its content until it is needed. Eviction takes empty pages first, then pages whose parent is gone, then
whole trees in order of their root's last use, leaves first.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from exl3.errors import ResourceError

PAGE = 256


class JobTooLargeError(ResourceError, AssertionError):
    """A job needs more pages than the cache has. Also an AssertionError: frontends written for the incumbent match on that."""


def page_hash(parent: bytes, tokens: np.ndarray) -> bytes:
    """16-byte BLAKE2b over the parent's hash and the page's tokens as little-endian int64."""
    return hashlib.blake2b(parent + tokens.astype("<i8").tobytes(), digest_size=16).digest()


@dataclass
class Page:
    """One page: `hash` is set once it is full and published; `tokens` are the ones whose keys and values it holds."""

    index: int
    refs: int = 0
    used: int = 0  # serial of the last use
    hash: bytes | None = None
    parent: bytes | None = None
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass
class Allocation:
    """Pages of a job in order; the first `cached` tokens need no prefill. `copy`: (source page, destination page) to copy before use."""

    pages: list[int]
    cached: int
    cached_pages: int
    copy: tuple[int, int] | None = None


class PageTable:
    """The pages of one cache. `root` tells apart what must not share a prefix (adapters)."""

    def __init__(self, n_pages: int, root: bytes = b"") -> None:
        if n_pages < 1:
            raise ResourceError("the cache has no pages: it needs at least 256 tokens")
        self.pages = [Page(i) for i in range(n_pages)]
        self.root = root
        self.by_hash: dict[bytes, Page] = {}
        self.by_parent: defaultdict[bytes, set[int]] = defaultdict(set)
        self.free = list(range(n_pages - 1, -1, -1))  # unreferenced and empty
        self.unreferenced = n_pages
        self.serial = 0
        self.allocated_pages = self.prompt_pages = self.hit_pages = 0  # totals, for the hit rate

    def __len__(self) -> int:
        return len(self.pages)

    def names(self, tokens: np.ndarray) -> list[bytes]:
        """Hashes of the full pages of `tokens`, without the last token's: one is always left to compute."""
        found, parent = [], self.root
        for at in range(0, (len(tokens) - 1) // PAGE * PAGE, PAGE):
            parent = page_hash(parent, tokens[at : at + PAGE])
            found.append(parent)
        return found

    def allocate(self, tokens: np.ndarray, total: int, reuse: bool = True, names: list[bytes] | None = None) -> Allocation | None:
        """Pages for a job of `total` tokens whose first are `tokens`; None if too few are free now. `names`: of `tokens`, if known.

        At least one token is always left to compute. With `reuse` False nothing cached is used (the job wants logits of its whole prompt).
        Raises JobTooLargeError if the cache could never hold it.
        """
        need = self.check_fits(total)
        found: list[Page] = []
        parent = self.root
        if reuse:
            for name in self.names(tokens) if names is None else names:
                page = self.by_hash.get(name)
                if page is None:
                    break
                found.append(page)
                parent = name
        if need - len(found) > self.unreferenced - sum(p.refs == 0 for p in found):
            return None
        self.serial += 1
        for page in found:
            self._take(page)
        at = len(found) * PAGE
        source, common = self._partial(parent, tokens[at : len(tokens) - 1]) if reuse else (None, 0)
        if source is not None:
            self._take(source)  # so that it is not evicted before it is copied
            if need - len(found) > self.unreferenced:
                self._drop(source)
                source, common = None, 0
        fresh = [self._fresh() for _ in range(need - len(found))]
        copy = None
        if source is not None:
            copy = (source.index, fresh[0].index)
            self._drop(source)
        self.allocated_pages += need
        self.prompt_pages += -(-len(tokens) // PAGE)
        self.hit_pages += len(found)
        return Allocation([p.index for p in found + fresh], at + common, len(found), copy)

    def check_fits(self, total: int) -> int:
        """Pages that `total` tokens need; JobTooLargeError if the cache has fewer."""
        need = -(-total // PAGE)
        if need > len(self.pages):
            raise JobTooLargeError(
                f"Job requires {need} pages (only {len(self.pages)} available) and cannot be enqueued: {total} tokens, "
                f"the cache holds {len(self.pages) * PAGE}. Shorten the prompt, lower max_new_tokens, or load with a larger cache."
            )
        return need

    def share(self, name: bytes, own: int) -> int | None:
        """Another page that bears `name`, taken in exchange for the still empty page `own`; None if there is none."""
        page = self.by_hash.get(name)
        if page is None or page.index == own:
            return None
        self.serial += 1
        self._take(page)
        self._drop(self.pages[own])
        return page.index

    def publish(self, page: int, parent: bytes, tokens: np.ndarray) -> bytes:
        """The page now holds these 256 tokens after `parent`: others may share it. Returns its hash (a twin may already bear it)."""
        name = page_hash(parent, tokens)
        if name not in self.by_hash:
            p = self.pages[page]
            self._forget(p)
            p.hash, p.parent, p.tokens = name, parent, np.array(tokens, np.int32)
            self.by_hash[name] = p
            self.by_parent[parent].add(page)
        return name

    def release(self, pages: Sequence[int], tail: tuple[int, bytes, np.ndarray] | None = None) -> None:
        """Gives a job's pages back. `tail`: (place in `pages` of the first that is not published, its parent's hash, its tokens): it stays
        usable for a copy."""
        self.serial += 1
        for at, index in enumerate(pages):
            p = self.pages[index]
            if tail is not None and at == tail[0] and len(tail[2]) >= 2:
                p.parent, p.tokens = tail[1], np.array(tail[2][:PAGE], np.int32)
                self.by_parent[p.parent].add(index)
            p.used = self.serial
            self._drop(p)

    def clear(self) -> None:
        """Forgets all content of unreferenced pages."""
        for p in self.pages:
            if p.refs == 0 and p.parent is not None:
                self._forget(p)
                self.free.append(p.index)

    @property
    def referenced(self) -> int:
        """Pages in use by jobs."""
        return len(self.pages) - self.unreferenced

    @property
    def cached(self) -> int:
        """Unreferenced pages that hold content."""
        return self.unreferenced - len(self.free)

    def _take(self, page: Page) -> None:
        if page.refs == 0:
            self.unreferenced -= 1
        page.refs += 1
        page.used = self.serial

    def _drop(self, page: Page) -> None:
        page.refs -= 1
        assert page.refs >= 0, "a page was released twice"
        if page.refs == 0:
            self.unreferenced += 1
            if page.parent is None:
                self.free.append(page.index)

    def _forget(self, page: Page) -> None:
        if page.hash is not None and self.by_hash.get(page.hash) is page:
            del self.by_hash[page.hash]
        if page.parent is not None:
            siblings = self.by_parent[page.parent]
            siblings.discard(page.index)
            if not siblings:
                del self.by_parent[page.parent]
        page.hash = page.parent = None
        page.tokens = page.tokens[:0]

    def _fresh(self) -> Page:
        if not self.free:
            self._evict()
        page = self.pages[self.free.pop()]
        self._take(page)
        return page

    def _partial(self, parent: bytes, tokens: np.ndarray) -> tuple[Page | None, int]:
        """The page after `parent` that shares the longest beginning with `tokens` (at least 2), and its length."""
        best, length = None, 1
        for index in self.by_parent.get(parent, ()):
            page = self.pages[index]
            n = min(len(page.tokens), len(tokens))
            differ = np.flatnonzero(page.tokens[:n] != tokens[:n])
            n = int(differ[0]) if len(differ) else n
            if n > length:
                best, length = page, n
        return (best, length) if best is not None else (None, 0)

    def _evict(self) -> None:
        """Empties the unreferenced pages that come first in the order of eviction: a sixteenth of the cache, to spread the cost."""
        order = sorted((p for p in self.pages if p.refs == 0 and p.parent is not None), key=self._eviction_key())
        assert order, "eviction asked for with nothing to evict"
        for page in order[: max(1, len(self.pages) // 16)]:
            self._forget(page)
            self.free.append(page.index)

    def _eviction_key(self) -> Callable[[Page], tuple[bool, int, int, int]]:
        """Key of a page: (rooted, last use of its tree, -depth, last use)."""
        known: dict[bytes, tuple[bool, int, int]] = {}  # hash of a page -> (rooted, use of the root, depth)

        def place(page: Page) -> tuple[bool, int, int]:
            chain = []
            at: Page | None = page
            while True:
                assert at is not None and at.parent is not None
                if at.hash is not None and at.hash in known:
                    base = known[at.hash]
                    break
                chain.append(at)
                above = self.by_hash.get(at.parent)
                if at.parent == self.root:
                    base = (True, at.used, -1)
                    break
                if above is None:
                    base = (False, at.used, -1)
                    break
                at = above
            for at in reversed(chain):
                base = (base[0], base[1], base[2] + 1)
                if at.hash is not None:
                    known[at.hash] = base
            return base

        def key(page: Page) -> tuple[bool, int, int, int]:
            rooted, use, depth = place(page)
            return rooted, use, -depth, page.used

        return key
