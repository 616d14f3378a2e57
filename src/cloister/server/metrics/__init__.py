"""Prometheus metrics. No label comes from a request.

`Metrics` shows all metrics; `ReleasedCounts` only the few sums that a strict profile permits. Both use the engine's events (the
source of all metrics) and the statuses of replies. `RecordedMetrics` keeps the last day. `EngineGauges` shows values that are
known without a request, and `TenantFigures` those of each tenant, for operators.
"""

from cloister.server.metrics.event_metrics import Metrics
from cloister.server.metrics.exposition import CONTENT_TYPE, EngineGauges, Exposition, ReleasedCounts
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
