"""Samplers, which choose among ready samples, by short name or import path; and micro-batch packing."""
