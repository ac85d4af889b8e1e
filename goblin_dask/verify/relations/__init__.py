"""Relations: how a claimed result of one operator is checked against its operands without computing it again.

A decomposition is checked by its residual and the orthogonality of its factors, an order by looking whether it is one,
linear transforms by one transform of a random combination. Some results have to be checked so: a decomposition is not
unique, nor are the places of equal elements, and another library returns another one that is as right.
"""

from goblin_dask.verify.relations.base import Relation
from goblin_dask.verify.relations.decompositions import DECOMPOSITIONS
from goblin_dask.verify.relations.ordering import ORDERS
from goblin_dask.verify.relations.solvers import SOLVERS
from goblin_dask.verify.relations.transforms import TRANSFORMS

RELATIONS: dict[str, Relation] = {**DECOMPOSITIONS, **SOLVERS, **ORDERS, **TRANSFORMS}
"""By operator."""
