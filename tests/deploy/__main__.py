"""The manifests in deploy/ against the schemas of Kubernetes and of the Spark operator: `make manifests`.

    python -m tests.deploy CRD.yaml

Needs kubernetes-validate. A field that a schema does not have is an error, as it is for a strict API server.
"""

import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"


def strict(schema):
    """The schema, without fields of other names."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(one) for name, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


def main() -> int:
    definition = yaml.safe_load(Path(sys.argv[1]).read_text())
    schemas = {one["name"]: one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"]}
    group = definition["spec"]["group"]
    found = 0
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            api, _, version = manifest["apiVersion"].partition("/")
            if api == group:
                schema = strict(schemas[version])
                schema["properties"]["metadata"] = {"type": "object"}
                jsonschema.Draft202012Validator(schema).validate(manifest)
            else:
                kubernetes_validate.validate(manifest, "1.33", strict=True)
            print(f"{path.name}: {manifest['kind']} {manifest['metadata']['name']} is valid")
            found += 1
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
