"""Maps the three floors onto one namespace package: `kernels/` is installed as `stepgraph.kernels`, and so on.

The folders stay at the top of the repository because they are what a reader opens first; the `stepgraph.` prefix is
added at installation because a bare top-level `kernels` would collide with a well-known package of that name.
"""

from setuptools import find_packages, setup

FLOORS = ("kernels", "model", "capture")

packages = [f"stepgraph.{floor}" for floor in FLOORS]
packages += [f"stepgraph.{floor}.{child}" for floor in FLOORS for child in find_packages(floor)]

setup(
    packages=packages,
    package_data={"stepgraph.kernels.tables": ["*.json"], "stepgraph.model": ["heads/*/*"]},
    package_dir={f"stepgraph.{floor}": floor for floor in FLOORS},
)
