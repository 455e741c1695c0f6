"""docs/routers.md shows the routers as they are described."""

from dataclasses import fields, replace

import pytest

from moeblaze_ref.core.routers import FAMILIES, ROUTERS, Family, Router
from moeblaze_ref.course.site import routers

TEXT = routers.DOCUMENT.read_text()


def test_the_table_is_that_of_the_families():
    assert routers.page(TEXT) == TEXT
    assert [line.split("`")[1] for line in routers.table().splitlines()[2:]] == [*ROUTERS]


def test_every_field_is_explained():
    _, section = TEXT.split("## A router of your own")
    explained = section.split("## ")[0]
    assert [field.name for field in fields(Router) if f"`{field.name}`" not in explained] == []


@pytest.mark.parametrize("name", ROUTERS)
def test_a_change_of_a_router_changes_its_row(name):
    router = FAMILIES[name].router
    other = {
        "scale": replace(router, scale=3.0),
        "logit_bias": replace(router, logit_bias=not router.logit_bias),
        "float32_product": replace(router, float32_product=not router.float32_product),
        "weighs": replace(router, weighs="input" if router.weighs == "output" else "output"),
    }
    row = routers._row(name, FAMILIES[name])
    rows = [routers._row(name, replace(FAMILIES[name], router=changed)) for changed in other.values()]
    assert all(changed != row for changed in rows)


def test_each_part_of_a_router_is_said():
    router = Router("sigmoid", True, 1e-6, 2.0, True, True, 4, 3, "top2", "input", True)
    assert routers._row("x", Family("X", router, "gated", {"scale": "factor"})) == [
        "`x`",
        "X",
        "in float32, a bias",
        "sigmoid of each logit",
        "add the selection bias; 3 of 4 groups by their two best experts, added up; k largest",
        "over their sum + 1e-06, times 2, multiply the experts' inputs",
        "yes, times a sigmoid",
        "`factor`",
    ]
