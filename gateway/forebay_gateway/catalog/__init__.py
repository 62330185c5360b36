"""What this node knows, durable: runs, checkpoints, sessions, parts, shards, copies. LMDB below, rows of core/records above."""

from forebay_gateway.catalog.env import Catalog
from forebay_gateway.catalog.indexes import index_problems
from forebay_gateway.catalog.mutations import WriteTxn, evicted_row
from forebay_gateway.catalog.queries import ReadTxn
from forebay_gateway.catalog.schema import CatalogDamaged
from forebay_gateway.catalog.storage import is_damage

__all__ = ["Catalog", "CatalogDamaged", "ReadTxn", "WriteTxn", "evicted_row", "index_problems", "is_damage"]
