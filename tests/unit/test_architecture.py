"""No two modules import each other, by whatever way round, for types alone included. (import-linter holds the rooms apart.)"""

from graphlib import CycleError, TopologicalSorter

import grimp

PACKAGES = ("flows", "tasks", "environments", "infra")


def test_no_module_imports_itself_by_others():
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 150
    try:
        list(TopologicalSorter(imports).static_order())
    except CycleError as circle:
        raise AssertionError(f"a circle of imports: {' <- '.join(circle.args[1])}") from None
