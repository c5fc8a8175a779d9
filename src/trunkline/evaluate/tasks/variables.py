"""Variable tracking: chains of assignments far from each other (in the style of RULER's, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.evaluate.tasks.filling import fill_with
from trunkline.evaluate.tasks.needles import groups_of
from trunkline.evaluate.tasks.plan import Asked, Expected, Materials, Plan, Statement


@dataclass(frozen=True)
class VariableTracking:
    """Which variables have a value that the first was given and each hands on to the next.

    The depths are dealt out to chains of at most `hops + 1` assignments. Each chain is asked for, and the others are
    what it can be confused with.
    """

    hops: int = 4
    name: str = "variables"

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""
        words, depths = materials.words, materials.depths
        if len(depths) < 2:
            raise ValueError(
                f"depths: task '{self.name}' needs 2 at least, a variable and one that is assigned from it, and there "
                f"is {len(depths)}. Set more depths, or leave the task out."
            )
        parts: list[tuple[str, ...]] = [()] * len(depths)
        asked = []
        for numbers in groups_of(len(depths), self.hops + 1):
            value, before, answers = words.number(5), "", []
            for number in numbers:
                variable = words.variable()
                source = (" VAR", f" {before}") if before else (f" {value}",)
                parts[number] = (" VAR", f" {variable}", " =", *source, ".")
                answers.append(Expected(value, variable, number))
                before = variable
            question = (" The variables whose value is", f" {value}", ",", " in the order of the text", ",", " are")
            asked.append(Asked(question, tuple(answers)))
        statements = tuple(Statement(part, depth) for part, depth in zip(parts, depths, strict=True))

        def fill(num_tokens: int) -> list[list[int]]:
            return fill_with(materials.pieces, materials.haystack.sentences(materials.draws), num_tokens)

        return Plan(
            " The following text assigns values to variables, and variables to others. They are asked for at its end.",
            statements,
            fill,
            materials.tokens_of(statements),
            " This is the end of the text.",
            tuple(asked),
        )
