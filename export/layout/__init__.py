"""Layouts as algebra: a tensor as a permuted, regrouped, repeated or partial view of another one."""
