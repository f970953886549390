#include "storage/snapshot_catalog.h"

#include <algorithm>
#include <cstdio>

#include "storage/record.h"

namespace kstep {
namespace {

constexpr char kPartial[] = ".partial";
constexpr std::size_t kMaxNameBytes = 64;

bool is_partial(const std::string& name) {
  const std::size_t n = sizeof(kPartial) - 1;
  return name.size() >= n && name.compare(name.size() - n, n, kPartial) == 0;
}

}  // namespace

std::string log_folder_name(std::uint32_t payload_bytes) { return "log-" + std::to_string(payload_bytes + kRecordTailBytes); }

std::string segment_file_name(std::uint64_t id) {
  char name[32];
  std::snprintf(name, sizeof(name), "seg-%016llx.seg", static_cast<unsigned long long>(id));
  return name;
}

Status SnapshotCatalog::check_name(const std::string& name) {
  const std::string allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";
  const bool is_good = !name.empty() && name.size() <= kMaxNameBytes && name[0] != '.' && !is_partial(name) &&
                       name.find_first_not_of(allowed) == std::string::npos;
  if (is_good) return {};
  return Status::invalid("snapshot name '" + name + "'",
                         "expected 1 to 64 letters, digits, '_', '-' or '.', not starting with '.' nor ending in '.partial'");
}

std::string SnapshotCatalog::folder(std::uint32_t path, const std::string& name) const { return snapshots_folder(path) + "/" + name; }

Status SnapshotCatalog::recover() {
  std::vector<std::string> committed;
  for (std::uint32_t path = 0; path < paths_.size(); ++path) {
    std::vector<std::string> names;
    KSTEP_RETURN_IF_ERROR(env_->list(snapshots_folder(path), &names));
    for (const std::string& name : names) {
      const bool is_leftover = is_partial(name) || (path > 0 && !std::binary_search(committed.begin(), committed.end(), name));
      if (is_leftover) {
        KSTEP_RETURN_IF_ERROR(env_->remove_tree(folder(path, name)));
      } else if (path == 0) {
        committed.push_back(name);
      }
    }
  }
  return {};
}

Status SnapshotCatalog::list(std::vector<std::string>* names) const {
  KSTEP_RETURN_IF_ERROR(env_->list(snapshots_folder(0), names));
  names->erase(std::remove_if(names->begin(), names->end(), is_partial), names->end());
  return {};
}

Status SnapshotCatalog::read(const std::string& name, Manifest* out) const {
  KSTEP_RETURN_IF_ERROR(check_name(name));
  const std::string path = folder(0, name) + "/MANIFEST";
  if (!env_->exists(folder(0, name))) return Status::not_found(folder(0, name), "no such snapshot");
  std::string text;
  KSTEP_RETURN_IF_ERROR(env_->read_text(path, &text));
  return Manifest::decode(path, text, out);
}

Status SnapshotCatalog::link_segments(const Manifest& manifest, std::uint32_t path) {
  const std::string partial = folder(path, manifest.name + kPartial);
  KSTEP_RETURN_IF_ERROR(env_->make_dir(partial));
  for (const ManifestLog& log : manifest.logs) {
    const std::string log_name = log_folder_name(log.payload_bytes);
    KSTEP_RETURN_IF_ERROR(env_->make_dir(partial + "/" + log_name));
    for (const ManifestSegment& segment : log.segments) {
      if (segment.path != path) continue;
      const std::string file = log_name + "/" + segment_file_name(segment.id);
      KSTEP_RETURN_IF_ERROR(env_->link(paths_[path] + "/" + file, partial + "/" + file));
    }
    KSTEP_RETURN_IF_ERROR(env_->sync_dir(partial + "/" + log_name));
  }
  return env_->sync_dir(partial);
}

Status SnapshotCatalog::commit(const Manifest& manifest, bool* is_doubtful) {
  *is_doubtful = false;
  KSTEP_RETURN_IF_ERROR(check_name(manifest.name));
  if (env_->exists(folder(0, manifest.name))) {
    return Status::invalid("snapshot '" + manifest.name + "'", "exists already; delete it first, or use another name");
  }
  for (std::uint32_t path = 0; path < paths_.size(); ++path) {
    KSTEP_RETURN_IF_ERROR(env_->remove_tree(folder(path, manifest.name + kPartial)));  // of an earlier failure
    KSTEP_RETURN_IF_ERROR(link_segments(manifest, path));
  }
  for (std::uint32_t path = 1; path < paths_.size(); ++path) {
    KSTEP_RETURN_IF_ERROR(env_->remove_tree(folder(path, manifest.name)));  // of an earlier failure
    KSTEP_RETURN_IF_ERROR(env_->rename(folder(path, manifest.name + kPartial), folder(path, manifest.name)));
    KSTEP_RETURN_IF_ERROR(env_->sync_dir(snapshots_folder(path)));
  }
  const std::string partial = folder(0, manifest.name + kPartial);
  KSTEP_RETURN_IF_ERROR(env_->write_text(partial + "/MANIFEST", manifest.encode()));
  KSTEP_RETURN_IF_ERROR(env_->sync_dir(partial));
  KSTEP_RETURN_IF_ERROR(env_->rename(partial, folder(0, manifest.name)));
  Status status = env_->sync_dir(snapshots_folder(0));
  *is_doubtful = !status.ok();
  return status;
}

Status SnapshotCatalog::remove(const std::string& name) {
  KSTEP_RETURN_IF_ERROR(check_name(name));
  if (!env_->exists(folder(0, name))) return Status::not_found(folder(0, name), "no such snapshot");
  const std::string partial = folder(0, name + kPartial);
  KSTEP_RETURN_IF_ERROR(env_->remove_tree(partial));
  KSTEP_RETURN_IF_ERROR(env_->rename(folder(0, name), partial));
  KSTEP_RETURN_IF_ERROR(env_->sync_dir(snapshots_folder(0)));
  for (std::uint32_t path = 1; path < paths_.size(); ++path) KSTEP_RETURN_IF_ERROR(env_->remove_tree(folder(path, name)));
  return env_->remove_tree(partial);
}

}  // namespace kstep
