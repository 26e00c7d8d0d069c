"""Recipes lie beside the package, where people read them; an installed package takes them along."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("recipes", Path(self.build_lib) / "equipoise" / "recipes", dirs_exist_ok=True)


setup(cmdclass={"build_py": WithRecipes})
