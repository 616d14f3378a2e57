"""Prometheus metrics. No label comes from a request.

`Metrics` shows every figure; `ReleasedCounts` the few sums that a strict profile lets out. Both read the engine's events
(one source for every figure) and the statuses of replies. `RecordedMetrics` remembers the
last day. `EngineGauges` says what is known without a request,
and `TenantFigures` what each tenant did, for operators.
"""

from cloister.server.metrics.facts import CONTENT_TYPE, EngineGauges, Exposition, ReleasedCounts
from cloister.server.metrics.figures import Metrics
from cloister.server.metrics.history import MetricsReport, RecordedMetrics
from cloister.server.metrics.tenants import TenantFigures, TenantsReport, make_tenant_figures, tells_tenants

__all__ = [
    "CONTENT_TYPE",
    "EngineGauges",
    "Exposition",
    "Metrics",
    "MetricsReport",
    "RecordedMetrics",
    "ReleasedCounts",
    "TenantFigures",
    "TenantsReport",
    "make_tenant_figures",
    "tells_tenants",
]
