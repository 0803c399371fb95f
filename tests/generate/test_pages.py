"""The page table: reuse, sharing, eviction order, and that no page is lost, by random runs against plain bookkeeping."""

import hashlib
import random

import numpy as np
import pytest

from exl3.generate.pages import JobTooLargeError, PageTable, page_hash


def ids(seed, n):
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def finish(table, allocation, tokens):
    """What a job does: publish its full pages, give all back."""
    parent, full = table.root, len(tokens) // 256
    for i in range(full):
        parent = table.publish(allocation.pages[i], parent, tokens[i * 256 : (i + 1) * 256])
    table.release(allocation.pages, (full, parent, tokens[full * 256 :]))


def test_hash_is_blake2b_over_parent_and_int64():
    tokens = ids(0, 256)
    want = hashlib.blake2b(b"parent" + b"".join(int(t).to_bytes(8, "little") for t in tokens), digest_size=16).digest()
    assert page_hash(b"parent", tokens) == want


def test_full_pages_are_found_again_and_one_token_is_left():
    table = PageTable(8)
    tokens = ids(0, 512)
    finish(table, table.allocate(tokens, 600), tokens)
    again = table.allocate(tokens, 600)
    assert again.cached_pages == 1 and again.cached == 511 and again.copy is not None  # of the second page all but one token, by copy
    other = table.allocate(np.concatenate([tokens, [5]]).astype(np.int32), 600)
    assert other.cached_pages == 2 and other.cached == 512 and other.pages[:1] == again.pages[:1]


def test_partial_page_is_copied():
    table = PageTable(8)
    tokens = ids(0, 300)
    first = table.allocate(tokens, 300)
    finish(table, first, tokens)
    changed = tokens.copy()
    changed[290] = 1001
    again = table.allocate(changed, 300)
    assert again.cached == 290 and again.copy == (first.pages[1], again.pages[1])
    nothing = table.allocate(ids(1, 300), 300)
    assert nothing.cached == 0 and nothing.copy is None


def test_reuse_can_be_refused():
    table = PageTable(8)
    tokens = ids(0, 600)
    finish(table, table.allocate(tokens, 600), tokens)
    assert table.allocate(tokens, 600, reuse=False).cached == 0


def test_waits_when_full_and_refuses_what_never_fits():
    table = PageTable(4)
    a = table.allocate(ids(0, 600), 700)
    assert table.allocate(ids(1, 600), 700) is None
    with pytest.raises(JobTooLargeError, match=r"5 pages \(only 4 available\) and cannot be enqueued"):
        table.allocate(ids(1, 600), 1025)
    table.release(a.pages)
    assert table.allocate(ids(1, 600), 700) is not None


def test_trees_go_in_order_of_their_last_use_leaves_first():
    table = PageTable(6)
    old, new = ids(0, 700), ids(1, 700)
    finish(table, table.allocate(old, 700), old)
    finish(table, table.allocate(new, 700), new)
    table.release(table.allocate(old[:300], 300).pages)  # the old tree is the more recently used one now
    three = table.allocate(ids(2, 700), 700)
    # the new tree is gone, the old one whole
    assert [p.parent is not None for p in table.pages].count(True) == 3
    table.release(three.pages)
    assert table.allocate(old, 700).cached_pages == 2


def test_orphans_go_first():
    table = PageTable(4)
    a = ids(0, 600)
    finish(table, table.allocate(a, 600), a)
    root = table.by_hash[page_hash(b"", a[:256])]
    table._forget(root)
    table.free.append(root.index)
    b = ids(1, 300)
    finish(table, table.allocate(b, 300), b)
    table.allocate(ids(2, 100), 100)
    assert table.allocate(b, 300) is not None and table.hit_pages >= 1


def test_pages_computed_meanwhile_are_shared():
    table = PageTable(8)
    tokens = ids(0, 600)
    a, b = table.allocate(tokens, 600), table.allocate(tokens, 600)
    name = table.publish(a.pages[0], table.root, tokens[:256])
    assert table.share(name, b.pages[0]) == a.pages[0]
    assert table.pages[a.pages[0]].refs == 2 and b.pages[0] in table.free
    assert table.share(b"nothing", b.pages[1]) is None


@pytest.mark.parametrize("seed", range(5))
def test_random_runs_lose_no_page(seed):
    rng = random.Random(seed)
    table, running = PageTable(16), []
    content: dict[int, list[int]] = {}  # page -> tokens written there, as a cache would hold them
    for _ in range(400):
        if running and rng.random() < 0.5:
            allocation, tokens = running.pop(rng.randrange(len(running)))
            finish(table, allocation, tokens)
            continue
        tokens = np.concatenate([ids(rng.randrange(3), rng.choice([10, 256, 300, 600])), ids(rng.randrange(50), rng.randrange(1, 300))])
        allocation = table.allocate(tokens, len(tokens) + rng.randrange(200))
        if allocation is None:
            continue
        assert len(set(allocation.pages)) == len(allocation.pages) and allocation.cached < len(tokens)
        if allocation.copy:
            content[allocation.copy[1]] = list(content[allocation.copy[0]])
        for i in range(allocation.cached):  # what is called cached is really there
            assert content[allocation.pages[i // 256]][i % 256] == tokens[i]
        for i in range(allocation.cached, len(tokens)):
            page = content.setdefault(allocation.pages[i // 256], [])
            del page[i % 256 :]
            page.append(int(tokens[i]))
        running.append((allocation, tokens))
        refs = [p.refs for p in table.pages]
        assert sum(refs) == sum(len(a.pages) for a, _ in running)
        assert table.referenced + table.cached + len(table.free) == 16
    for allocation, tokens in running:
        finish(table, allocation, tokens)
    assert table.referenced == 0
    table.clear()
    assert len(table.free) == 16
