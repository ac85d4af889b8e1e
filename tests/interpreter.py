"""A plan, run in this process by the plainest means: what every other way to run one must agree with."""

from __future__ import annotations

import numpy as np

from goblin_dask.graphs.capture.dask_internals import Request
from goblin_dask.graphs.capture.pytree import specs_of, unflatten
from goblin_dask.graphs.execute import execute
from goblin_dask.labnode.lowering import LateLowering, arrays_of, lower


class Interpreter:
    """A scheduler for Dask: ``scheduler=Interpreter()``. Afterwards `plans` are those that it has run."""

    def __init__(self, check=True):
        self.check = check
        self.plans = []
        self.late = []
        """Of each dynamic task: whether it became a grid task, else why not."""

    def __call__(self, graph, keys, **kwargs):
        request = Request.of(graph, keys)
        plan = lower(request, None, check=self.check)
        self.plans.append(plan)
        return request.assemble(self.run(plan))

    def run(self, plan):
        """Values of the plan's keys."""
        producers = {}
        for task in plan.grid:
            for output in task.outputs:
                producers[output.key] = task
        for task in (*plan.lab, *plan.dynamic):
            assert task.key not in producers, f"{task.key} is defined twice"
            producers[task.key] = task
        late, values = LateLowering(), {}
        stack = list(plan.keys)
        while stack:
            key = stack[-1]
            if key in values:
                stack.pop()
                continue
            task = producers[key]
            needs = [o.key for o in task.operands] if hasattr(task, "operands") else task.dependencies
            missing = [each for each in needs if each not in values]
            if missing:
                assert len(stack) < 10**6
                stack.extend(missing)
                continue
            stack.pop()
            if hasattr(task, "operands"):
                self.grid(task, values)
            elif hasattr(task, "kind"):
                values[key] = self.lab(plan, task, values)
            else:
                self.dynamic(late, task, values)
        return {key: values[key] for key in plan.keys}

    @staticmethod
    def grid(task, values):
        inputs = [np.asarray(arrays_of(values[o.key])[o.leaf]) for o in task.operands]
        outputs = execute(task.program, inputs)
        for output in task.outputs:
            values[output.key] = unflatten(output.tree, [each.copy() for each in outputs])

    @staticmethod
    def lab(plan, task, values):
        if task.region is not None:
            value = np.asarray(task.region.array[task.region.index])
        else:
            value = task.task({key: values[key] for key in task.dependencies})
        if task.key in plan.specs and task.kind != "lab":
            declared, actual = plan.specs[task.key], specs_of(value)
            assert str(declared) == str(actual), f"{task.key}: {declared} {actual}"
        return value

    def dynamic(self, late, task, values):
        trees = {}
        for key in task.dependencies:
            try:
                trees[key] = specs_of(values[key])
            except TypeError:
                trees[key] = None
        found = late.trace_at_run_time(task, trees, values.__getitem__)
        self.late.append(True if not isinstance(found, str) else found)
        if isinstance(found, str):
            values[task.key] = task.task({key: values[key] for key in task.dependencies})
        else:
            self.grid(found, values)
