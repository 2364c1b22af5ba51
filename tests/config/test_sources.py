"""data.sources: the shares that its weights mean, and what is refused by name."""

import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import yaml

from shmap_tp.config.choices import Documents
from shmap_tp.config.compose import from_values, load, to_dict, to_yaml
from shmap_tp.config.schema import DataConfig
from shmap_tp.config.sources import check_sources, describe_shares, each_source, phases
from tests.helpers.config_errors import FIRST, check_messages, composed, error_message, refusal
from tests.helpers.paths import ROOT

ALONE = ("data.dir=null", "data.source=null")
TWO = "{web:{dir:data/web,weight:0.7},code:{dir:data/code,weight:0.3}}"
LATER = "{a:{dir:x,weight:0.56},b:{dir:y,weight:0.24},c:{dir:gs://bucket/z,weight:0.2,from_step:1000}}"
GIVEN = {
    TWO: [{"code": "0.3", "web": "0.7"}],
    "{a:{dir:x,weight:1/3},b:{dir:y,weight:2/3}}": [{"a": "1/3", "b": "2/3"}],
    LATER: [{"a": "0.7", "b": "0.3"}, {"a": "0.56", "b": "0.24", "c": "0.2"}],
    "{a:{dir:x,weight:{0:0.7,1000:0.4}},b:{dir:y,weight:{0:0.3,1000:0}},c:{dir:z,weight:{1000:0.6}}}": [
        {"a": "0.7", "b": "0.3"}, {"a": "0.4", "c": "0.6"},
    ],
    "{a:{dir:x,weight:{0:1,1000:1}}}": [{"a": "1"}],
}  # fmt: skip


def data_of(sources: str) -> DataConfig:
    """As data.sources=`sources` has it, without Hydra."""
    given = yaml.safe_load(re.sub(":(?!/)", ": ", sources))
    return replace(composed().data, dir=None, source=None, sources=given)


def test_the_shares_of_the_sources_add_up_to_1_in_each_phase():
    for given, expected in GIVEN.items():
        found = phases(data_of(given))
        assert [phase.first for phase in found] == [0, 1000][: len(found)]
        exact = [{name: Fraction(share) for name, share in shares.items()} for shares in expected]
        assert [phase.shares for phase in found] == exact


@pytest.mark.parametrize("given", [[*GIVEN][1], [*GIVEN][3]], ids=["numbers", "phases"])
def test_sources_stay_in_a_saved_configuration(tmp_path, given):
    config = load(FIRST, [*ALONE, f"data.sources={given}"])
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    found = phases(data_of(given))
    assert phases(config.data) == found and load(str(tmp_path / "saved.yaml"), []).data == config.data
    assert phases(from_values(json.loads(json.dumps(to_dict(config))), "of a checkpoint").data) == found


def test_the_data_file_of_the_guide_has_the_shares_that_it_means():
    text = (ROOT / "docs" / "data.md").read_text()
    (block,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "sources:" in block)
    data = DataConfig(**yaml.safe_load(block), documents=Documents.isolated)
    check_sources(data)
    assert describe_shares("web", phases(data), 10**6) == "70 %, from step 100000 on 50 %"
    assert describe_shares("code", phases(data), 10**6) == "30 %"
    assert describe_shares("math", phases(data), 10**6) == "0 %, from step 100000 on 20 %"
    parts = phases(data_of(LATER))
    assert describe_shares("c", parts, 1000) == "0 %, from step 1000 on 20 % (never read: train.steps=1000)"


def test_a_source_is_read_as_a_data_dir_of_its_own():
    each = each_source(data_of(TWO))
    assert {name: data.dir for name, data in each.items()} == {"code": "data/code", "web": "data/web"}
    assert each_source(composed().data) == {"": composed().data}


REFUSED = {
    "{a:{dir:x,weight:0.7},b:{dir:y,weight:0.2}}": "weights add up to 0.9 from step 0 on (a 0.7 + b 0.2)",
    "{a:{dir:x,weight:0.7},b:{dir:y,weight:0.4}}": "weights add up to 1.1",
    "{a:{dir:x,weight:0.33},b:{dir:y,weight:0.33},c:{dir:z,weight:0.33}}": "weights add up to 0.99",
    "{a:{dir:x,weight:{0:0.7,9:0.5}},b:{dir:y,weight:0.3}}": "weights add up to 0.8 from step 9 on",
    "{a:{dir:x,weight:0.7,from_step:3}}": "no source has a weight from step 0 on",
    "{a:{dir:x,weight:-0.7},b:{dir:y,weight:1}}": "data.sources.a.weight=-0.7 must be a number from 0 to 1 such as",
    "{a:{dir:x,weight:0.123456},b:{dir:y,weight:0.876544}}": "are fractions of 15625, above 10000",
    "{a:{dir:x,weight:1/999},b:{dir:y,weight:1/998},c:{dir:z,weight:0.9}}": "are fractions of 4985010",
    "{a:{dir:x,weight:1/0}}": "data.sources.a.weight=1/0 must be a number from 0 to 1",
    "{a:{dir:x,weight:true}}": "data.sources.a.weight=true must be a number",
    "{a:{dir:x,weight:{}}}": "data.sources.a.weight must be a number beside from_step, or such as {0: 0.7, 1000: 0.5}",
    "{a:{dir:x,weight:{0:1},from_step:0}}": "data.sources.a.weight must be a number beside from_step",
    "{a:{dir:x,weight:1,from_step:-1}}": "data.sources.a.from_step: -1 is no step",
    "{a:{dir:x,weight:1,from_step:1.5}}": "data.sources.a.from_step: 1.5 is no step",
    "{a:{dir:x,weight:{b:1}}}": "data.sources.a.weight: b is no step",
    "{a:{dir:x,wieght:1}}": "must have dir, weight and perhaps from_step, as in {web: {dir: data/web, weight: 0.7}",
    "{a:{weight:1}}": "must have dir, weight",
    "{a:{dir:x}}": "must have dir, weight",
    "{a:x}": "data.sources.a=x must have dir, weight",
    "{a:{dir:3,weight:1}}": "must have dir, weight",
    "{a:{dir:s3://x/y,weight:1}}": "data.sources.a.dir=s3://x/y is not a path of this machine or gs://BUCKET",
    "{a-b:{dir:x,weight:1}}": "data.sources.a-b: a source's name has letters, digits and _",
}


def test_sources_that_cannot_be_read_are_refused_by_name():
    check_messages(lambda given: refusal(check_sources, data_of(given)), REFUSED, apart=None)


def test_a_data_dir_beside_sources_is_refused_and_so_is_none_of_both():
    two = f"data.sources={TWO}"
    message = "data.dir=data/stdlib has no effect with data.sources; use data.dir=null data.source=null"
    assert message in error_message(FIRST, two)
    assert "data.source=stdlib has no effect with data.sources" in error_message(FIRST, "data.dir=null", two)
    missing = "data.dir=null: name the directory of the data, or several in data.sources"
    assert missing in error_message(FIRST, "data.dir=null")
