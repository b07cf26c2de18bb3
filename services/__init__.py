"""The five services; none of them imports another."""
