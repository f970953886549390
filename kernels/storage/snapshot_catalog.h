// SnapshotCatalog: makes, lists and deletes snapshot folders; the commit order of docs/format.md section 4.
//
// Ownership: borrows the Env. Thread rule: one thread at a time.
#pragma once

#include <string>
#include <vector>

#include "storage/manifest.h"

namespace kstep {

class SnapshotCatalog {
 public:
  SnapshotCatalog(Env* env, std::vector<std::string> paths) : env_(env), paths_(std::move(paths)) {}

  static Status check_name(const std::string& name);
  std::string folder(std::uint32_t path, const std::string& name) const;

  // Removes what a crash left behind. REQUIRES: the store's locks are held.
  Status recover();
  // Names of committed snapshots, sorted by name. Their manifests may still be damaged.
  Status list(std::vector<std::string>* names) const;
  Status read(const std::string& name, Manifest* out) const;
  // Links every segment named by `manifest` from the live folders and commits. *is_doubtful is set when it
  // failed after the commit was issued, so that neither outcome is certain.
  Status commit(const Manifest& manifest, bool* is_doubtful);
  Status remove(const std::string& name);

 private:
  std::string snapshots_folder(std::uint32_t path) const { return paths_[path] + "/snapshots"; }
  Status link_segments(const Manifest& manifest, std::uint32_t path);

  Env* env_;
  std::vector<std::string> paths_;
};

// Folder and file names shared by the live log and snapshots.
std::string log_folder_name(std::uint32_t payload_bytes);
std::string segment_file_name(std::uint64_t id);

}  // namespace kstep
