"""Claims in columns say what single claims say, and are in agreement only where no single one shows a fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.elastic.comm.errors import BadMessage
from megatron.elastic.comm.messages import decode, encode
from megatron.elastic.state import certificate
from megatron.elastic.state.claims import Claim, Claims, in_agreement
from megatron.elastic.state.hashing import text_hash
from megatron.elastic.state.layout import BlockKey

VERSION = 7
KEYS = tuple((unit, shard, number) for unit in (0, 3) for shard in (0, 1) for number in range(3))
RANKS = (0, 1, 2, 5)
HOLDERS = dict.fromkeys(KEYS, (0, 1, 2))
MIRRORS = {key: 1 + key[0] % 2 for key in KEYS}
ALTERATIONS = (
    "version",
    "lineage",
    "content",
    "role",
    "lost",
    "one more",
    "another block",
    "owner elsewhere",
    "a large number",
    "a negative number",
    "renamed",
    "renamed to what another key is as one integer",
)
STEADY = settings(deadline=None, derandomize=True, database=None, max_examples=300)


def sound(hashed: frozenset[BlockKey]) -> dict[int, dict[BlockKey, Claim]]:
    """Claims without a fault; contents of ``hashed`` are known."""
    found: dict[int, dict[BlockKey, Claim]] = {rank: {} for rank in RANKS}
    for at, key in enumerate(KEYS):
        ranks = [RANKS[(at + place) % len(RANKS)] for place in range(len(RANKS))]
        owner = next(rank for rank in ranks if rank in HOLDERS[key])
        others = [rank for rank in ranks if rank != owner][: MIRRORS[key]]
        content = text_hash(f"content {key}") if key in hashed else ""
        for rank in (owner, *others):
            role = "owner" if rank == owner else "mirror"
            master = text_hash(f"master {key}") if content and role == "owner" else ""
            found[rank][key] = Claim(role, VERSION, text_hash(str(key)), content, master)
    return found


def alter(claims: dict[int, dict[BlockKey, Claim]], what: str, rank: int, key: BlockKey) -> None:
    """Change the claim of ``rank`` about ``key``, or make one."""
    claim = claims[rank].get(key, Claim("mirror", VERSION, text_hash(str(key))))
    if what == "lost":
        claims[rank].pop(key, None)
        return
    changed = {
        "version": claim._replace(version=VERSION - 1),
        "lineage": claim._replace(lineage=text_hash("other")),
        "content": claim._replace(content=text_hash("other")),
        "role": claim._replace(role="mirror" if claim.role == "owner" else "owner"),
        "one more": claim,
    }
    if what.startswith("renamed"):
        name = (key[0] + 1, *key[1:]) if what == "renamed" else (key[0], key[1] - 1, key[2] + (1 << 20))
        for mine in claims.values():
            if key in mine:
                mine[name] = mine.pop(key)
    elif what in changed:
        claims[rank][key] = changed[what]
    elif what == "another block":
        claims[rank][key[0] + 1, *key[1:]] = claim
    elif what == "owner elsewhere":
        claims[5][key] = claim._replace(role="owner")
        claims[rank].pop(key, None)
    else:
        claims[rank][key[0], key[1], key[2] + (1 << 20 if "large" in what else -9)] = claim


def faults(claims: dict[int, Claims], parked: bool) -> list[str]:
    return list(certificate._copies(claims, HOLDERS, MIRRORS, VERSION, parked))


@STEADY
@given(
    st.frozensets(st.sampled_from(KEYS)),
    st.lists(st.tuples(st.sampled_from(ALTERATIONS), st.sampled_from(RANKS), st.sampled_from(KEYS)), max_size=3),
    st.booleans(),
)
def test_claims_in_agreement_have_no_fault(
    hashed: frozenset[BlockKey], alterations: list[tuple[str, int, BlockKey]], parked: bool
) -> None:
    """And those without a fault are in agreement: else each step's certificate would take the long way."""
    single = sound(hashed)
    for what, rank, key in alterations:
        alter(single, what, rank, key)
    claims = {rank: Claims.of(mine) for rank, mine in single.items()}
    assert in_agreement(claims, HOLDERS, MIRRORS, VERSION, parked) == (not faults(claims, parked))


@pytest.mark.parametrize("what", ALTERATIONS)
def test_each_alteration_is_a_fault_of_some_claim(what: str) -> None:
    """So the test above does not pass because all that it draws is sound."""
    found = 0
    for rank in RANKS:
        for key in KEYS:
            single = sound(frozenset(KEYS))
            alter(single, what, rank, key)
            claims = {rank: Claims.of(mine) for rank, mine in single.items()}
            found += bool(faults(claims, parked=False))
            assert in_agreement(claims, HOLDERS, MIRRORS, VERSION, False) == (not faults(claims, parked=False))
    assert found >= len(KEYS)


def test_single_claims_come_back_from_columns() -> None:
    mine = sound(frozenset(KEYS[:2]))[0]
    mine[KEYS[0]] = mine[KEYS[0]]._replace(version=-1)
    single = Claims.of(mine).single
    assert single == mine and list(single) == list(mine)
    other = {KEYS[0]: mine[KEYS[0]]._replace(lineage="of another form")}
    assert Claims.of(other).single[KEYS[0]].lineage == text_hash("of another form")
    assert Claims.of({}).single == {} and in_agreement({0: Claims()}, {}, {}, VERSION, False)


@pytest.mark.parametrize("column", ["keys", "owned", "versions", "lineages"])
def test_columns_of_unlike_lengths_from_a_peer_name_the_rank(column: str) -> None:
    claims = Claims.of(sound(frozenset())[0])
    whole = encode(claims)
    assert decode(Claims, whole, 3) == claims
    damaged = object.__new__(Claims)
    vars(damaged).update({**vars(claims), column: getattr(claims, column) + b"\0"})
    with pytest.raises(BadMessage, match="rank 3"):
        decode(Claims, encode(damaged), 3)
    with pytest.raises(ValueError, match="copies"):
        replace(claims, **{column: getattr(claims, column) + b"\0"})
