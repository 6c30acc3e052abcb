"""What pyproject.toml cannot say: conf/ is installed as palimpsest_conf, without a machine's own settings."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["evaluation*", "kernels*", "data_pipeline*", "lit_modules*", "common*"]),
        "palimpsest_conf",
    ],
    package_dir={"palimpsest_conf": "conf"},
    package_data={"palimpsest_conf": ["**/*.yaml"], "evaluation": ["compare/*.jinja"]},
    exclude_package_data={"palimpsest_conf": ["local/*"]},
)
