"""fuse(kv_cache=...): what looks across a sentence's new tokens would see the padding of an uneven batch."""

from __future__ import annotations

import onnx
import pytest
from flashonnx.export import fuse

POSITIONS = "pf=Cast<to=1>(position_ids) pu=Unsqueeze(pf,two)"
MIXED = {
    "last position": "l=Slice(position_ids,m1,big,one) lf=Cast<to=1>(l) lu=Unsqueeze(lf,two) h=Add(x,lu)",
    "backwards": "l=Slice(position_ids,m1,small,one,m1) lf=Cast<to=1>(l) lu=Unsqueeze(lf,two) h=Add(x,lu)",
    "mean": f"m=ReduceMean<keepdims=1>(x,one) {POSITIONS} h0=Add(x,pu) h=Sub(h0,m)",
    "attention": f"n=Attention<q_num_heads=1,kv_num_heads=1>(x,x,x) {POSITIONS} h0=Add(x,pu) h=Add(h0,n)",
    "last logits": f"{POSITIONS} h=Add(x,pu)",
    "product": f"xt=Transpose<perm=[0,2,1]>(x) n=MatMul(xt,x) {POSITIONS} h0=Add(x,pu) h=MatMul(h0,n)",
}
ALIKE = {
    "no mixture": f"{POSITIONS} h=Add(x,pu)",
    "all of a slice": f"{POSITIONS} h0=Add(x,pu) h=Slice(h0,zero,big,one)",
    "causal attention": (
        f"n=Attention<is_causal=1,q_num_heads=1,kv_num_heads=1>(x,x,x) {POSITIONS} h0=Add(x,pu) h=Add(h0,n)"
    ),
    "mean of features": f"m=ReduceMean<keepdims=1>(x,two) {POSITIONS} h0=Add(x,pu) h=Sub(h0,m)",
}


def decoder(before: str, last: bool = False) -> onnx.ModelProto:
    end = "logits=Slice(y,m1,big,one)" if last else "logits=Identity(y)"
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23]>
    g (float[b,s,8] x, int64[b,s] position_ids, float[b,1,p,8] pk, float[b,1,p,8] pv)
      => (float[b,{"1" if last else "s"},8] logits, float[b,1,t,8] prk, float[b,1,t,8] prv)
    <int64[1] m1 = {{-1}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
     int64[1] big = {{9223372036854775807}}, int64[1] small = {{-9223372036854775807}}>
    {{ {before} hs=Sin(h) y,prk,prv=Attention<is_causal=1,q_num_heads=1,kv_num_heads=1>(hs,hs,hs,,pk,pv) {end} }}""")


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("name", MIXED)
def test_refused(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"looks across the new tokens|nothing shows how many tokens"):
        fuse(decoder(MIXED[name], name == "last logits"), kv_cache=kind)


@pytest.mark.parametrize("name", ALIKE)
def test_taken(name: str) -> None:
    fused, _ = fuse(decoder(ALIKE[name]), kv_cache="static")
    assert "cache_lengths" in [value.name for value in fused.graph.input]
